"""Runs the parts of `quantizer analyze` that calibrate: `--tensors` and `--metric`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import TracedTarget
from quantizer.cli import session
from quantizer.cli.analyzed_data import on_device
from quantizer.cli.calib_mode import require_calibration_room
from quantizer.cli.evaluation import evaluator_of
from quantizer.cli.follow import OneBar, progress, run_display
from quantizer.cli.gates import (
    MEASURED,
    Gate,
    about_all,
    names_in_test,
    parse_gate,
    require_known,
    require_known_parts,
    require_measured,
)
from quantizer.cli.options import Options
from quantizer.cli.render import say_note
from quantizer.cli.screen import without_notes
from quantizer.cli.session import ReadConfig
from quantizer.config.document.document import Document
from quantizer.config.forms.left_float import with_float
from quantizer.config.load import check_document
from quantizer.config.model import Config
from quantizer.config.wording import counted
from quantizer.errors import GateError
from quantizer.evaluation.ablation import Ablation, ablate_calibrated
from quantizer.evaluation.analyze import NOISE_BATCHES, few
from quantizer.evaluation.cheapest import (
    FloatPart,
    cheapest_parts,
    float_parts,
    most_trials,
    needed_layers,
)
from quantizer.evaluation.measurable import never_measured_metrics, not_measured_by_targets
from quantizer.evaluation.scores import score
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import output_parts
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.report.tables import finite_row
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate, LoadedModel


@dataclass(frozen=True)
class Subject:
    """A config, with the model and data that it is analysed on."""

    options: Options
    read: ReadConfig
    loaded: LoadedModel
    batches: Batches
    original: Graph

    def calibrated(
        self, config: Config, events: Events | None = None, fast_finetune: str | None = None
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
            target=TracedTarget(self.original),
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


def measured_tensors(subject: Subject, events: Events | None = None) -> tuple[Ablation, Plan]:
    """Measure the effect of each quantized tensor on the output, on the first batches.

    `events` gets the progress, which has a bar of its own if it is None.
    """
    options = subject.options
    calibrated, plan = subject.calibrated(subject.read.config, events)
    batches = min(subject.batches.total or NOISE_BATCHES, NOISE_BATCHES)
    total = batches * len(calibrated.solution.tensors)
    follower = events or progress(quiet=options.json)
    with RunStage(follower, "analyze tensors", total, "tensors") as stage:
        ablation = ablate_calibrated(
            calibrated,
            few(lambda: on_device(options, subject.batches, subject.original)),
            after_tensor=stage.advance,
            is_alone_measured=True,
        )
    return ablation, plan


@dataclass(frozen=True)
class FloatSearch:
    """The result of a search for layers to leave in float.

    Attributes:
        gate: that has to hold.
        chosen: the layers.
        config: with these layers in float.
        before: the metrics of the original config.
        after: the metrics of `config`.
        runs: the number of tests.
    """

    gate: Gate
    chosen: Sequence[FloatPart]
    config: Mapping[str, Any]
    before: Mapping[str, float]
    after: Mapping[str, float]
    runs: int

    def to_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        floats = [{"layers": list(part.layers), "bytes": part.cost} for part in self.chosen]
        metrics = {"before": finite_row(self.before), "after": finite_row(self.after)}
        return {
            "metric": self.gate.text,
            "float": floats,
            "metrics": metrics,
            "runs": self.runs,
            "config": self.config,
        }

    def summary_lines(self, paths: Mapping[str, str]) -> list[str]:
        """Return the result for people, with layers by their module paths."""
        metric = self.gate.metric
        lines = [f"{metric} {self.before[metric]:.6g} with the config as it is"]
        if not self.chosen:
            return [*lines, f"{self.gate.text} already holds: nothing is changed"]
        layers = layers_of(self.chosen)
        for layer in layers:
            lines.append(f"float: {paths.get(layer, layer)}")
        extra = sum(part.cost for part in self.chosen)
        lines.append(
            f"{metric} {self.after[metric]:.6g} with them in float: "
            f"{counted(len(layers), 'layer')}, {extra / 1e6:.3f} MB of weights and of one "
            f"sample's values; {counted(self.runs, 'test run')}"
        )
        return lines


def layers_of(parts: Sequence[FloatPart]) -> tuple[str, ...]:
    """Return the layers of all parts."""
    layers: list[str] = []
    for part in parts:
        layers += part.layers
    return tuple(layers)


class _Trials:
    """Runs tests with layers in float, and keeps their metrics.

    Attributes:
        runs: the metrics by the layers that were in float.
    """

    def __init__(
        self, subject: Subject, gate: Gate, evaluator: Evaluate | None, events: Events
    ) -> None:
        self.runs: dict[tuple[str, ...], Mapping[str, float]] = {}
        self._subject = subject
        self._gate = gate
        self._evaluator = evaluator
        self._events = events
        self._evaluation = session.open_data(subject.options, subject.loaded, evaluation=True)

    def first_batch(self) -> Batch:
        """Return the first batch that tests run on."""
        return self._evaluation.first()

    def document(self, layers: Sequence[str]) -> dict[str, Any]:
        """Return the config with these layers in float."""
        return with_float(self._subject.read.config.document, list(layers))

    def needed_document(self, layers: Sequence[str]) -> dict[str, Any]:
        """Return the shortest config with these layers in float."""
        return self.document(needed_layers(layers, self._plan))

    def _plan(self, layers: Sequence[str]) -> Plan:
        config = self._config(layers)
        original = self._subject.original
        return resolve_plan(config, run_passes(original, config.settings), original)

    def _config(self, layers: Sequence[str]) -> Config:
        changed = Document.of(self.document(layers), "the config with layers in float")
        return check_document(changed).require()

    def holds(self, chosen: Sequence[FloatPart]) -> bool:
        """Return whether the gate holds with these parts in float."""
        key = layers_of(chosen)
        if key not in self.runs:
            with without_notes():
                self.runs[key] = self._metrics(chosen)
            value = self.runs[key][self._gate.metric]
            layers = counted(len(key), "layer")
            say_note(f"{layers} in float: {self._gate.metric} {value:.6g}")
        return self._gate.holds(self.runs[key])

    def _metrics(self, chosen: Sequence[FloatPart]) -> Mapping[str, float]:
        config = self._config(layers_of(chosen))
        calibrated, _ = self._subject.calibrated(config, self._events)
        scores = score(
            calibrated,
            self._subject.loaded.module,
            self._evaluation,
            self._events,
            function=self._evaluator,
            check=self._check,
        )
        require_known([self._gate], scores.gated)
        return scores.metrics | {self._gate.metric: scores.gated[self._gate.metric]}

    def _check(self, metrics: Collection[str]) -> None:
        directions = BY_NAME if self._evaluator is None else self._evaluator.directions
        names = names_in_test(metrics, self._subject.options, directions)
        require_known(about_all([self._gate]), names)


def cheapest_floats(subject: Subject, metric: str) -> tuple[FloatSearch, Ablation]:
    """Find the layers to leave in float for a metric to hold, at the least bytes.

    Returns:
        The layers, and the effects of all tensors.

    Raises:
        UsageError: there is no such metric.
        GateError: it does not hold, or only with the whole network in float.
    """
    options = subject.options
    gate = parse_gate(metric, "--metric")
    evaluator = evaluator_of(options, subject.loaded)
    if evaluator is None:
        require_known(about_all([gate]), names_in_test(MEASURED, options))
    require_known_parts([gate], output_parts(subject.original))
    require_measured([gate], never_measured_metrics(subject.original))
    with RunStage(progress(quiet=options.json), "analyze", unit="steps") as whole:
        events = OneBar(whole)
        trials = _Trials(subject, gate, evaluator, events)
        if evaluator is None:
            targets = not_measured_by_targets(trials.first_batch(), subject.original)
            require_measured([gate], targets)
        # This refuses a metric that is not measured, before all tensors are measured.
        trials.holds(())
        steps_of_trial = whole.done
        with without_notes():
            ablation, plan = measured_tensors(subject, events)
        parts = float_parts(plan, ablation)
        whole.total = whole.done + steps_of_trial * most_trials(len(parts))
        chosen = cheapest_parts(parts, trials.holds)
    if chosen is None:
        raise GateError(
            f"{gate.text} does not hold even with all these layers in float",
            help="relax the bound of --metric",
        )
    if parts and len(chosen) == len(parts):
        raise GateError(
            f"{gate.text} holds only with all layers in float, where nothing is quantized",
            help="relax the bound of --metric",
        )
    search = FloatSearch(
        gate,
        chosen,
        trials.needed_document(layers_of(chosen)),
        before=trials.runs[()],
        after=trials.runs[layers_of(chosen)],
        runs=len(trials.runs),
    )
    return search, ablation
