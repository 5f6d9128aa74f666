"""The trials of `quantizer analyze` and `quantizer tune`: a config to try, a change of one, and
what was measured on it. All trials share the model and its data. They are calibrated and tested
in memory.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import Target
from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.modes.calib_mode import require_calibration_room
from quantizer.cli.terminal.follow import progress, run_display
from quantizer.cli.terminal.screen import without_notes
from quantizer.config.algorithms import Algorithm
from quantizer.config.document.document import Document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document
from quantizer.config.model import ResolvedConfig
from quantizer.config.run_options import with_finetuning
from quantizer.errors import UsageError
from quantizer.evaluation.analyze import WatchedData
from quantizer.evaluation.scores import measure, score
from quantizer.export.exporting import as_run
from quantizer.export.gates import Gate, require_known_names
from quantizer.export.refusals import planned_refusals, refuse
from quantizer.export.targets import checked_target
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import weight_bytes
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.models import LoadedModel
from quantizer.torch_state import seed_everything

LEAST_GAIN = 0.01
"""A change gains something if it takes away this share of the distance from the gates. Less is
chance.
"""
TIE_DB = 0.1
"""If a change gains less than that, it has to raise the SQNR of the outputs by so many dB."""


@dataclass(frozen=True)
class Trial:
    """A config, and the mode of finetuning that it is calibrated with.

    Attributes:
        document: the config, in its form's words.
        fast_finetune: "adaround", "adaquant" or None.
    """

    document: JsonMapping
    fast_finetune: str | None = None

    @cached_property
    def config(self) -> ResolvedConfig:
        """Return the checked config.

        Raises:
            ConfigError: it has errors.
            UsageError: it cannot be finetuned so.
        """
        document = Document.of(self.document, "the changed config")
        config = check_document(document).require()
        config, _ = with_finetuning(config, None, self.fast_finetune)
        return config

    @property
    def key(self) -> str:
        """Return a text that is the same for equal trials only."""
        return json.dumps([self.document, self.fast_finetune], default=str)


@dataclass(frozen=True)
class Change:
    """A change of a config that may come nearer to the gates.

    Attributes:
        text: what it does to the config, as part of a sentence.
        apply: returns the changed trial. It raises `UsageError` if the config's form has no
            word for the change.
        undoes: the name of the earlier step whose change this one removes; empty if it removes
            none.
    """

    text: str
    apply: Callable[[Trial], Trial]
    undoes: str = ""


@dataclass(frozen=True)
class Figures:
    """What was measured on a trial.

    Attributes:
        metrics: the figures of a test, by name.
        shortfalls: for each gate the distance of its metric from the bound, as a share of the
            bound; 0 if the gate holds, infinity if nothing could be measured.
        weight_bytes: the bytes of all parameters, quantized.
        missed_by_float: the gates that do not hold for the float network either.
        parts: the figures of single outputs and parts.
    """

    metrics: Mapping[str, float]
    shortfalls: tuple[float, ...]
    weight_bytes: int
    missed_by_float: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def gated(self) -> Mapping[str, float]:
        """Return all figures, by the names that gates use."""
        return {**self.metrics, **self.parts}

    @property
    def is_met(self) -> bool:
        """Return whether all gates hold."""
        return not any(self.shortfalls)

    def is_better_than(self, other: Figures) -> bool:
        """Return whether no metric is farther from its bound than in `other`, and something is
        gained: less distance in all, or else a higher SQNR of the outputs.

        >>> before = Figures({"sqnr_db": 20.0}, (0.5,), 100)
        >>> Figures({"sqnr_db": 20.0}, (0.4,), 100).is_better_than(before)
        True
        >>> Figures({"sqnr_db": 21.0}, (0.5,), 100).is_better_than(before)
        True
        """
        pairs = zip(self.shortfalls, other.shortfalls, strict=True)
        # Written with `not`, so that NaN is worse than any number
        if not all(after <= before for after, before in pairs):
            return False
        distance_before = math.fsum(other.shortfalls)
        if math.fsum(self.shortfalls) < distance_before * (1 - LEAST_GAIN):
            return True
        before_db = other.metrics.get("sqnr_db")
        after_db = self.metrics.get("sqnr_db")
        if before_db is None or after_db is None:
            return False
        return after_db > before_db + TIE_DB


def _on_device(options: Options, batches: Batches, graph: Graph) -> Iterator[Batch]:
    """Yield batches without padding, on the device of `--device`.

    Args:
        options: name the device.
        batches: the data.
        graph: the trace that they will run through.
    """
    device = session.device_of(options)
    for batch in batches.without_padding(graph):
        yield batch.to(device)


def watched_data(options: Options, batches: Batches, graph: Graph) -> WatchedData:
    """Return the data of an analysis, whose progress is shown."""
    start = partial(_on_device, options, batches, graph)
    return WatchedData(start, batches.total, progress(quiet=options.json))


@dataclass(frozen=True)
class Subject:
    """A config, with the model and the calibration data that it is analysed on."""

    options: Options
    read: session.ReadConfig
    loaded: LoadedModel
    batches: Batches
    original: Graph

    def calibrated(
        self,
        config: ResolvedConfig,
        events: Events | None = None,
        fast_finetune: str | None = None,
    ) -> tuple[Calibrated, Plan]:
        """Return the model calibrated with a config, in memory, and the plan.

        Args:
            config: of the calibration.
            events: gets the progress and the messages, which are logged if it is None.
            fast_finetune: how weights are finetuned, if they are.

        Raises:
            OutOfMemoryError: there is not enough memory.
            ConfigError, ModelError, DataError: as `run_calibration`.
        """
        request = CalibrationRequest(
            target=Target(self.original),
            config=config,
            batches=self.batches,
            events=events or run_display(self.read.sources, quiet=True),
            seed=self.options.seed,
            memory=self.options.memory,
            fast_finetune=fast_finetune,
            confirm=partial(require_calibration_room, self.options),
        )
        state = steps.run_calibration(request)
        calibrated = Calibrated(self.original, config.settings, state.solution)
        return calibrated, state.calibration.plan

    def on_device(self) -> Iterator[Batch]:
        """Begin a pass over the calibration data, without padding, on the model's device."""
        return _on_device(self.options, self.batches, self.original)


class BarOfLongUnits(Events):
    """Shows in the bar of one stage how far the inner stage is that runs.

    A unit of the outer stage consists of inner stages, and `count` counts it.
    """

    def __init__(self, whole: RunStage) -> None:
        self._whole = whole

    def advanced(self, stage: RunStage) -> None:
        """Show the inner stage's progress after that of the outer one."""
        total = f"/{stage.total}" if stage.total else ""
        self._whole.describe(f"{stage.name} {stage.done}{total} {stage.unit}")

    def count(self) -> None:
        """Count one unit."""
        self._whole.advance()


class SearchContext:
    """Calibrates and tests trials, and compares their metrics with gates.

    Args:
        subject: the model and the data that calibrate.
        evaluation: the data that test.
        gates: the bounds of metrics.
        targets: the targets that have to be able to hold each plan.
        run_as: the targets whose runtimes the tests imitate.

    Attributes:
        bar: shows the progress of calibrations and tests, inside `shown_as`.
    """

    bar: BarOfLongUnits

    def __init__(
        self,
        subject: Subject,
        evaluation: Batches,
        gates: Sequence[Gate],
        *,
        targets: Sequence[str] = (),
        run_as: Sequence[str] = (),
    ) -> None:
        self.subject = subject
        self.evaluation = evaluation
        self.gates = gates
        self.original = subject.original
        self._targets = targets
        self._run_as = run_as
        self._options = subject.options
        self._evaluator = session.evaluator_of(self._options, subject.loaded)
        self._float_metrics: Mapping[str, float] | None = None

    @contextmanager
    def shown_as(self, name: str) -> Iterator[RunStage]:
        """Show the progress of all tests in one bar.

        The float network is the same for all trials, so it is evaluated once.

        Raises:
            UsageError: there is no metric of a gate.
        """
        display = progress(quiet=self._options.json)
        with RunStage(display, name, unit="tests") as whole:
            self.bar = BarOfLongUnits(whole)
            if self._evaluator is not None:
                seed_everything(self._options.seed)
                self._float_metrics = measure(
                    self.subject.loaded.module,
                    self.evaluation,
                    session.device_of(self._options),
                    self.bar,
                    label="evaluate float",
                    function=self._evaluator,
                )
                # A misspelt metric is refused before the first calibration
                require_known_names(
                    self.gates,
                    self._options.deploy,
                    self._float_metrics,
                    self._evaluator.directions,
                )
            yield whole

    def measure(self, trial: Trial) -> Figures:
        """Calibrate and test a trial with the seed of the run, without notes on the screen."""
        calibrated, plan = self.calibrate(trial)
        with without_notes():
            run_as = as_run(
                self._run_as,
                calibrated.graph,
                calibrated.solution,
                self._options.target_choices,
            )
            seed_everything(self._options.seed)
            scores = score(
                calibrated.with_solution(run_as),
                self.subject.loaded.module,
                self.evaluation,
                self.bar,
                function=self._evaluator,
                before=self._float_metrics,
            )
        self.bar.count()
        parts = scores.comparison.named_metrics()
        return self.figures(scores.metrics, plan, parts, is_valid=scores.fault is None)

    def figures(
        self,
        metrics: Mapping[str, float],
        plan: Plan,
        parts: Mapping[str, float] | None = None,
        *,
        is_valid: bool = True,
    ) -> Figures:
        """Return metrics, how far each gate is from holding, and the bytes of the weights.

        Args:
            metrics: of a test, by the names that gates use.
            plan: of its calibration.
            parts: the metrics of single outputs and parts, if `metrics` has them not.
            is_valid: whether the test found no fault. After a fault no gate holds.
        """
        parts = parts or {}
        gated = {**metrics, **parts}
        shortfalls = []
        missed_by_float = []
        for gate in self.gates:
            shortfalls.append(shortfall(gate, gated) if is_valid else math.inf)
            if gate.is_missed_by_float(gated):
                missed_by_float.append(gate.text)
        _, quantized_bytes = weight_bytes(plan)
        return Figures(
            metrics, tuple(shortfalls), quantized_bytes, tuple(missed_by_float), parts
        )

    def calibrate(self, trial: Trial) -> tuple[Calibrated, Plan]:
        """Calibrate a trial in memory with the seed of the run; return it and its plan."""
        seed_everything(self._options.seed)
        with without_notes():
            return self.subject.calibrated(trial.config, self.bar, trial.fast_finetune)

    def batches(self) -> Iterator[Batch]:
        """Begin a pass over the calibration data, on the model's device."""
        return self.subject.on_device()

    def refusal(self, plan: Plan, algorithms: Iterable[Algorithm]) -> str:
        """Return why a target cannot hold a plan; an empty text if all targets can."""
        for target in self._targets:
            checked = checked_target(target, self._options.target_choices)
            try:
                refuse(checked.words, planned_refusals(checked, plan, algorithms))
            except UsageError as error:
                return error.message
        return ""


def plan_of(trial: Trial, original: Graph) -> Plan:
    """Return the plan of a trial for a model, before algorithms."""
    graph = run_passes(original, trial.config.settings)
    return resolve_plan(trial.config, graph, original)


def shortfall(gate: Gate, metrics: Mapping[str, float]) -> float:
    """Return how far the metric of a gate is from the bound, relative to the bound: 0 if the
    gate holds, infinity without a figure.

    >>> from quantizer.export.gates import parse_gate
    >>> shortfall(parse_gate("sqnr_db>=20"), {"sqnr_db": 15.0})
    0.25
    """
    value = metrics.get(gate.metric, math.nan)
    if math.isnan(value):
        return math.inf
    if gate.holds(metrics):
        return 0.0
    distance = abs(value - gate.bound) / (abs(gate.bound) or 1.0)
    return max(distance, sys.float_info.min)
