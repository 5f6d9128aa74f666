"""Climbs the ladder of `quantizer run --gate` and `quantizer tune`: divides the data, judges
each rung by the gates, and writes what came out.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from quantizer.calibration.events import Events, RunStage
from quantizer.cli import session
from quantizer.cli.analyze_tensors import Subject
from quantizer.cli.calib_mode import run_calib
from quantizer.cli.float_mode import evaluator_of
from quantizer.cli.follow import OneBar, progress
from quantizer.cli.gates import Gate, about_all, names_in_test, require_known
from quantizer.cli.options import Options, option
from quantizer.cli.render import say_note
from quantizer.cli.screen import without_notes
from quantizer.cli.session import OpenedRun, Outcome, ReadConfig
from quantizer.cli.test_mode import run_test
from quantizer.config.forms.tuned import with_tuning_comments
from quantizer.config.wording import counted
from quantizer.errors import UsageError
from quantizer.evaluation.ladder.climb import START, Climb, Climber, Row
from quantizer.evaluation.ladder.rungs import Ground, Judged, Rung
from quantizer.evaluation.scores import Scores, score
from quantizer.export import as_run, checked_target, planned_refusals, refuse
from quantizer.plan.model import Plan
from quantizer.plan.size import weight_bytes
from quantizer.report.ladder_table import climb_json, ladder_table, result_lines
from quantizer.results.calibrated import Calibrated
from quantizer.results.folder import read_info
from quantizer.results.result_set import locked_as_opened
from quantizer.seeding import seed_everything
from quantizer.sources.data import Batches
from quantizer.sources.directions import BY_NAME
from quantizer.sources.models import LoadedModel
from quantizer.storage.atomic_write import replace_file
from quantizer.storage.files import cannot_use, write_json

TUNED_CONFIG = "tuned_config.json"
"""The config of a climb that started from a file of the user."""
TUNE_FILE = "tune.json"
_SHARE_HELD_BACK = 4
"""One of so many batches judges, if there is no other evaluation data."""


def minutes_option(text: str) -> Any:
    """Return the field of `--minutes`, whose help is this text."""
    return option(text, default=10.0, type=click.FloatRange(0), metavar="N", group="Algorithm")


def with_remark(opened: OpenedRun, climb: Climb) -> OpenedRun:
    """Return a run that says after its test why the ladder was not enough."""
    text = (
        "no change of the config meets the gate, and tune.json has what was tried: relax the "
        "bound, or choose another preset."
    )
    if climb.is_out_of_time:
        text = "give more --minutes: the time was up before all changes were tried."
    return opened.with_improvement(text)


@dataclass(frozen=True)
class DividedData:
    """The samples that calibrate, and the others, which judge.

    Attributes:
        calibration: the batches of calibrations.
        evaluation: the batches of tests.
        calib_options, test_options: those of the run, with the samples of each.
        sentence: says what was held back; empty if the data were apart already.
    """

    calibration: Batches
    evaluation: Batches
    calib_options: Options
    test_options: Options
    sentence: str = ""


def divide_data(options: Options, opened: OpenedRun) -> DividedData:
    """Return the data of calibration and of tests. Without evaluation data, the last quarter of
    the calibration data is held back.

    Raises:
        UsageError: there is one batch only.
    """
    loaded = opened.loaded
    if _has_evaluation_data(options, loaded):
        evaluation = session.open_data(options, loaded, evaluation=True)
        return DividedData(opened.batches, evaluation, options, options)
    sizes = [batch.size for batch in opened.batches]
    if len(sizes) < 2:
        raise UsageError(
            f"{opened.batches.label} has one batch, and there is no other evaluation data",
            help="give --eval_data, add evaluation_data() to the model's file, or give more "
            "batches: a config is judged on data that calibration does not use",
        )
    count = max(1, len(sizes) // _SHARE_HELD_BACK)
    first = sum(sizes[:-count])
    others = sum(sizes[-count:])
    calib_options = replace(options, subset_len=first)
    limit = None if options.subset_len is None else others
    test_options = replace(options, skip_len=first, subset_len=limit)
    return DividedData(
        session.open_data(calib_options, loaded),
        session.open_data(test_options, loaded, evaluation=True),
        calib_options,
        test_options,
        f"the last {counted(others, 'sample')} of {first + others} judge each config, and do "
        f"not calibrate: --subset_len {first} for calib, --skip_len {first} for test",
    )


def _has_evaluation_data(options: Options, loaded: LoadedModel) -> bool:
    """Return whether tests have other data than calibration."""
    if options.skip_len:
        return True
    if options.eval_data:
        return options.eval_data != options.data
    return options.data is None and loaded.evaluation_data is not loaded.calibration_data


class GateJudge:
    """Judges rungs by the gates of a run.

    Args:
        opened: the model, its trace and its data.
        data: divided.
        gates: of the run.
        targets: that a plan must fit.
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
        self._events: Events | None = None

    @property
    def read(self) -> ReadConfig:
        """Return the config that the ladder starts from."""
        return self._subject.read

    def climb(self, minutes: float, fast_finetune: str | None, judged: Judged | None) -> Climb:
        """Climb the ladder.

        Args:
            minutes: after which no step begins.
            fast_finetune: the mode of the start.
            judged: what was measured on the start, if it was.

        Raises:
            QuantizerError: the start cannot be measured.
        """
        ground = Ground(
            self._subject.original,
            self.judge,
            self._calibrate,
            lambda: session.on_device(self._options, self.data.calibration),
            self._refusal,
        )
        start = Rung(self.read.config.document, fast_finetune)
        climber = Climber(ground, 60 * minutes, after_row=self._say)
        with RunStage(progress(quiet=self._options.json), "tune", unit="steps") as whole:
            self._events = OneBar(whole)
            return climber.climb(start, judged)

    def judge(self, rung: Rung) -> Judged:
        """Calibrate and test a rung."""
        with without_notes():
            calibrated, plan = self._calibrate(rung)
            run_as = as_run(
                self._run_as,
                calibrated.graph,
                calibrated.solution,
                self._options.target_choices,
            )
            scores = self._scores(calibrated.with_solution(run_as))
        self._require_other_data()
        return self.judged(scores.gated, plan, is_valid=scores.fault is None)

    def judged(
        self, metrics: Mapping[str, float], plan: Plan, *, is_valid: bool = True
    ) -> Judged:
        """Return what the figures of a test say about the gates."""
        shortfalls = []
        for gate in self.gates:
            shortfall = gate.shortfall(metrics) if is_valid else math.inf
            shortfalls.append(shortfall)
        return Judged(metrics, tuple(shortfalls), weight_bytes(plan)[1])

    def _calibrate(self, rung: Rung) -> tuple[Calibrated, Plan]:
        seed_everything(self._options.seed)
        return self._subject.calibrated(rung.config, self._events, rung.fast_finetune)

    def _scores(self, calibrated: Calibrated) -> Scores:
        seed_everything(self._options.seed)
        scores = score(
            calibrated,
            self._subject.loaded.module,
            self.data.evaluation,
            self._events or progress(quiet=True),
            function=self._evaluator,
            check=self._check,
            before=self._float_metrics,
        )
        if self._evaluator is not None:
            before = {name: pair["float"] for name, pair in scores.pairs.items()}
            self._float_metrics = before
        return scores

    def _check(self, metrics: Collection[str]) -> None:
        directions = BY_NAME if self._evaluator is None else self._evaluator.directions
        names = names_in_test(metrics, self._options, directions)
        require_known(about_all(self.gates), names)

    def _require_other_data(self) -> None:
        """Raise `UsageError` if tests read the batches of calibration."""
        used = self.data.calibration.fingerprint
        if used is not None and used == self.data.evaluation.fingerprint:
            raise UsageError(
                "the evaluation data are the calibration data",
                help="give other --eval_data, or leave it out: then a part of the calibration "
                "data is held back",
            )

    def _refusal(self, plan: Plan) -> str:
        """Return why the targets cannot hold a plan; empty if they can."""
        for target in self._targets:
            checked = checked_target(target, self._options.target_choices)
            try:
                refuse(checked.words, planned_refusals(checked, plan))
            except UsageError as error:
                return error.message
        return ""

    def _say(self, row: Row) -> None:
        """Print a line about a step that is done."""
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


def write_config(path: Path, read: ReadConfig, climb: Climb) -> None:
    """Write the config of the best rung, with comments that say what was changed.

    Raises:
        ResultError: it cannot be written.
    """
    rung = climb.rung
    document = with_tuning_comments(rung.document, climb.changes, rung.fast_finetune)
    text = read.text_of(document)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(read.encoding))
    except OSError as error:
        raise cannot_use(path.parent, error) from None


@dataclass(frozen=True)
class TunedRun:
    """The calibration and the test of the best rung of a climb.

    Attributes:
        calibrated, tested: the results of both modes.
        test_options: the options of the test.
    """

    calibrated: Outcome
    tested: Outcome
    test_options: Options


def run_tuned(
    judge: GateJudge, climb: Climb, path: Path, opened: OpenedRun, *, deploy: Sequence[str] = ()
) -> TunedRun:
    """Write the config of the best rung, and calibrate and test it as the modes do.

    Args:
        judge: of the climb.
        climb: the result.
        path: of the config.
        opened: the model and its data.
        deploy: the targets to write.

    Raises:
        QuantizerError: a mode failed.
    """
    write_config(path, judge.read, climb)
    data = judge.data
    gates = tuple(gate.text for gate in judge.gates)
    calib_options = replace(
        data.calib_options,
        quant_mode="calib",
        config_file=str(path),
        fast_finetune=climb.rung.fast_finetune,
        gate=(),
    )
    test_options = replace(
        data.test_options,
        quant_mode="test",
        config_file=str(path),
        fast_finetune=None,
        overwrite=False,
        gate=gates,
        for_=(),
        deploy=tuple(deploy),
    )
    opened = opened.with_batches(data.calibration)
    seed_everything(calib_options.seed)
    calibrated = run_calib(calib_options, opened=opened)
    seed_everything(calib_options.seed)
    tested = run_test(test_options, opened=opened)
    return TunedRun(calibrated, tested, test_options)


@dataclass(frozen=True)
class Tuning:
    """A climb whose config is written.

    Attributes:
        climb: what was tried.
        judge: what judged it.
        minutes: the time budget.
        config: the path of the written config.
    """

    climb: Climb
    judge: GateJudge
    minutes: float
    config: str

    @property
    def content(self) -> dict[str, object]:
        """Return the content of tune.json."""
        gates = [gate.text for gate in self.judge.gates]
        return {
            **climb_json(self.climb, gates),
            "minutes": self.minutes,
            "data": self.judge.data.sentence,
            "config": self.config,
        }

    def write(self, folder: Path) -> None:
        """Write tune.json into the result folder of the best rung.

        Raises:
            ResultError: another calibration was written there meanwhile.
        """
        info = read_info(folder)
        with locked_as_opened(info.files):
            write_json(folder / TUNE_FILE, info.with_checksum(self.content))

    def show(self, *, stderr: bool = False) -> None:
        """Print the table of the steps, and what was changed."""
        console = session.console(stderr=stderr)
        metrics = [gate.metric for gate in self.judge.gates]
        console.print(ladder_table(self.climb, metrics))
        for line in result_lines(self.climb, self.judge.data.sentence, self.config):
            session.print_line(line, console)
        sys.stdout.flush()
