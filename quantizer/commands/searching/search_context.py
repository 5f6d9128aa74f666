"""What the trials of `quantizer analyze` and `quantizer tune` share: the model and its data. It
calibrates and tests trials in memory.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage
from quantizer.calibration.request import CalibrationRequest
from quantizer.calibration.target import Target
from quantizer.cli.arguments.options import Options
from quantizer.cli.modes.calib_mode import require_calibration_room
from quantizer.cli.modes.gates import Gate, require_known_names
from quantizer.cli.opening import session
from quantizer.cli.opening.evaluation import evaluator_of
from quantizer.cli.opening.session import ReadConfig
from quantizer.cli.terminal.follow import progress, run_display
from quantizer.cli.terminal.screen import without_notes
from quantizer.commands.searching.trial import Figures, Trial
from quantizer.config.model import Algorithm, ResolvedConfig
from quantizer.errors import UsageError
from quantizer.evaluation.analyze import WatchedData
from quantizer.evaluation.scores import measure, score
from quantizer.export.exporting import as_run, planned_refusals, refuse
from quantizer.export.targets import checked_target
from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.results.calibrated import Calibrated
from quantizer.seeding import seed_everything
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.models import LoadedModel
from quantizer.sources.padding import without_padding


def _on_device(options: Options, batches: Batches, graph: Graph) -> Iterator[Batch]:
    """Yield batches without padding, on the device of `--device`.

    Args:
        options: name the device.
        batches: the data.
        graph: the trace that they will run through.
    """
    device = session.device_of(options)
    for batch in without_padding(batches, graph):
        yield batch.to(device)


def watched_data(options: Options, batches: Batches, graph: Graph) -> WatchedData:
    """Return the data of an analysis, whose progress is shown."""
    start = partial(_on_device, options, batches, graph)
    return WatchedData(start, batches.total, progress(quiet=options.json))


@dataclass(frozen=True)
class Subject:
    """A config, with the model and the calibration data that it is analysed on."""

    options: Options
    read: ReadConfig
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
        self._whole.doing = f"{stage.name} {stage.done}{total} {stage.unit}"
        self._whole.advance(self._whole.done)

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
        self._evaluator = evaluator_of(self._options, subject.loaded)
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
                    self.gates, self._options, self._float_metrics, self._evaluator.directions
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
            shortfall = gate.shortfall(gated) if is_valid else math.inf
            shortfalls.append(shortfall)
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
