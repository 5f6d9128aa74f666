"""Judges the configs of a ladder by gates: calibrates and tests each, in memory."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from quantizer.calibration.events import Events, RunStage
from quantizer.cli import session
from quantizer.cli.analyze_tensors import Subject
from quantizer.cli.analyzed_data import on_device
from quantizer.cli.divided_data import DividedData
from quantizer.cli.evaluation import evaluator_of
from quantizer.cli.follow import BarOfLongUnits, progress
from quantizer.cli.gates import Gate, about_all, names_in_test, require_known
from quantizer.cli.render import say_note
from quantizer.cli.screen import without_notes
from quantizer.cli.session import OpenedRun, ReadConfig
from quantizer.config.model import Algorithm
from quantizer.errors import UsageError
from quantizer.evaluation.ladder.admission import Admission
from quantizer.evaluation.ladder.climb import START, Climb, Climber, Row
from quantizer.evaluation.ladder.rungs import Ground, Judged, Rung
from quantizer.evaluation.scores import Scores, measure, score
from quantizer.export import as_run, checked_target, planned_refusals, refuse
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.results.calibrated import Calibrated
from quantizer.seeding import seed_everything
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import Evaluate


class GateJudge:
    """Calibrates and tests rungs, and compares their metrics with the gates of a run.

    Args:
        opened: the model and its trace.
        data: the batches that calibrate, and those that test.
        gates: the bounds of metrics.
        targets: the targets that have to be able to hold each plan.
        run_as: the targets whose runtimes the tests imitate.
    """

    def __init__(
        self,
        opened: OpenedRun,
        data: DividedData,
        gates: Sequence[Gate],
        *,
        targets: Sequence[str],
        run_as: Sequence[str],
    ) -> None:
        self.data = data
        self.gates = gates
        self._targets = targets
        self._run_as = run_as
        self._options = data.calib_options
        self._evaluator = evaluator_of(self._options, opened.loaded)
        self._subject = Subject(
            self._options,
            session.read_config_file(self._options.config_file),
            opened.loaded,
            data.calibration,
            opened.graph,
        )
        self._float_metrics: Mapping[str, float] | None = None
        self._bar: BarOfLongUnits | None = None

    @property
    def start_config(self) -> ReadConfig:
        """Return the config that the ladder starts from, with the text of its file."""
        return self._subject.read

    def climb(self, minutes: float, fast_finetune: str | None, judged: Judged | None) -> Climb:
        """Change the config step by step until the gates hold.

        Args:
            minutes: the time after which no rung is measured.
            fast_finetune: the mode of finetuning of the start; None without.
            judged: what a test of the start has measured; None to measure it.

        Raises:
            UsageError: a target cannot hold the start, or there is no metric of a gate.
            QuantizerError: the start cannot be measured.
        """
        ground = Ground(
            self._subject.original,
            self.judge,
            self._calibrate,
            lambda: on_device(self._options, self.data.calibration, self._subject.original),
            self._refusal,
        )
        start = Rung(self.start_config.config.document, fast_finetune)
        refusal = self._refusal(Admission(ground, start).plan, start.config.algorithms)
        if refusal:
            raise UsageError(refusal, help="start from a config that this target can hold")
        climber = Climber(ground, 60 * minutes, after_row=self._print_step)
        display = progress(quiet=self._options.json)
        with RunStage(display, "tune", unit="tests") as whole:
            self._bar = BarOfLongUnits(whole)
            # The float network is the same for all rungs, so it is evaluated once. A misspelt
            # metric is refused before the first calibration
            if self._evaluator is not None:
                self._float_metrics = self._evaluated(self._evaluator, self._bar)
                self._require_metrics(self._float_metrics)
            return climber.climb(start, judged)

    def judge(self, rung: Rung) -> Judged:
        """Calibrate and test a rung, without notes on the screen."""
        with without_notes():
            calibrated, plan = self._calibrate(rung)
            run_as = as_run(
                self._run_as,
                calibrated.graph,
                calibrated.solution,
                self._options.target_choices,
            )
            scores = self._scores(calibrated.with_solution(run_as))
        if self._bar is not None:
            self._bar.count()
        return self.judged_by_metrics(scores.gated, plan, is_valid=scores.fault is None)

    def judged_by_metrics(
        self, metrics: Mapping[str, float], plan: Plan, *, is_valid: bool = True
    ) -> Judged:
        """Return metrics, how far each gate is from holding, and the bytes of the weights.

        Args:
            metrics: of a test, by the names that gates use.
            plan: of its calibration.
            is_valid: whether the test found no fault. After a fault no gate holds.
        """
        shortfalls = []
        missed_by_float = []
        for gate in self.gates:
            shortfall = gate.shortfall(metrics) if is_valid else math.inf
            shortfalls.append(shortfall)
            if gate.is_missed_by_float(metrics):
                missed_by_float.append(gate.text)
        _, quantized_bytes = weight_bytes(plan)
        return Judged(metrics, tuple(shortfalls), quantized_bytes, tuple(missed_by_float))

    def _calibrate(self, rung: Rung) -> tuple[Calibrated, Plan]:
        """Calibrate a rung in memory with the seed of the run; return it and its plan."""
        seed_everything(self._options.seed)
        return self._subject.calibrated(rung.config, self._bar, rung.fast_finetune)

    def _scores(self, calibrated: Calibrated) -> Scores:
        """Test a calibrated rung with the seed of the run; return its scores."""
        seed_everything(self._options.seed)
        return score(
            calibrated,
            self._subject.loaded.module,
            self.data.evaluation,
            self._bar or progress(quiet=True),
            function=self._evaluator,
            before=self._float_metrics,
        )

    def _evaluated(self, evaluator: Evaluate, events: Events) -> dict[str, float]:
        """Return the user's metrics of the float model, with the seed of the run."""
        seed_everything(self._options.seed)
        return measure(
            self._subject.loaded.module,
            self.data.evaluation,
            session.device_of(self._options),
            events,
            label="evaluate float",
            function=evaluator,
        )

    def _require_metrics(self, metrics: Collection[str]) -> None:
        """Raise `UsageError` if a gate is about a metric that the test does not measure."""
        directions = BY_NAME if self._evaluator is None else self._evaluator.directions
        names = names_in_test(metrics, self._options, directions)
        require_known(about_all(self.gates), names)

    def _refusal(self, plan: Plan, algorithms: Iterable[Algorithm]) -> str:
        """Return why a target cannot hold a plan; an empty text if all targets can."""
        for target in self._targets:
            checked = checked_target(target, self._options.target_choices)
            try:
                refuse(checked.words, planned_refusals(checked, plan, algorithms))
            except UsageError as error:
                return error.message
        return ""

    def _print_step(self, row: Row) -> None:
        """Print a line about a step after it is done."""
        if row.judged is None:
            say_note(f"{row.step}: not tried: {'; '.join(row.reasons)}")
            return
        figures = []
        for gate in self.gates:
            value = row.judged.metrics.get(gate.metric, math.nan)
            figures.append(f"{gate.metric} {value:.6g}")
        change = row.change or "the config as it is"
        result = "" if row.step == START else f": {row.result}"
        say_note(f"{row.step}: {change}: {', '.join(figures)}{result}")
