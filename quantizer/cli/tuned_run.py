"""Searches for a config with which gates hold, for `quantizer run --gate` and `quantizer tune`.
Writes the config, its calibration and test, tune.json and the table. Both commands also share
fields of options here.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantizer.cli import session
from quantizer.cli.calib_mode import run_calib
from quantizer.cli.divided_data import DividedData
from quantizer.cli.gates import Gate
from quantizer.cli.options import Options, option
from quantizer.cli.outcome import Outcome
from quantizer.cli.places import PathType, minutes
from quantizer.cli.render import say_note
from quantizer.cli.search_context import SearchContext, Subject
from quantizer.cli.session import OpenedRun, ReadConfig
from quantizer.cli.start_folder import from_start
from quantizer.cli.test_mode import run_test
from quantizer.config.forms.level_edits import with_tuning_comments
from quantizer.errors import UsageError
from quantizer.evaluation.search.context import plan_of
from quantizer.evaluation.search.search import START, Row, Search
from quantizer.evaluation.search.steps import STEPS
from quantizer.evaluation.search.trial import Figures, Trial
from quantizer.plan.model import Plan
from quantizer.report.sensitivity import result_lines, search_json, search_table
from quantizer.results.folder import TUNE_FILE, read_info
from quantizer.results.result_set import locked_as_opened, mark_result_folder
from quantizer.seeding import seed_everything
from quantizer.storage.files import cannot_use, write_json
from quantizer.storage.replacing import replace_file

TUNED_CONFIG = "tuned_config.json"
"""The name of the written config if the search started from a file of the user."""


def minutes_option(text: str) -> Any:
    """Return the field of `--minutes`, whose help is this text."""
    return option(text, default=10.0, type=minutes, metavar="N", group="Algorithm")


def results_folder_option(text: str) -> Any:
    """Return the field of `--output_dir`, also `-o`, whose help is this text."""
    return option(
        text, "-o", default="quantize_result", type=PathType(), metavar="DIR", group="Output"
    )


@dataclass(frozen=True)
class TunedRun:
    """A search for a config, and the calibration and the test of its best trial.

    Attributes:
        search: the trials, and the best of them.
        gates: that have to hold.
        sentence: on the data that judge; empty if there is nothing to say.
        minutes: the time budget.
        config: the path of the written config.
        opened: the model and its data.
        calibrated: the result of calib mode.
        tested: the result of test mode.
        test_options: the options of the test.
    """

    search: Search
    gates: Sequence[Gate]
    sentence: str
    minutes: float
    config: str
    opened: OpenedRun
    calibrated: Outcome
    tested: Outcome
    test_options: Options

    @property
    def content(self) -> dict[str, object]:
        """Return the content of tune.json."""
        gates = [gate.text for gate in self.gates]
        return {
            **search_json(self.search, gates),
            "minutes": self.minutes,
            "data": self.sentence,
            "config": self.config,
        }

    def show(self) -> None:
        """Print the table of the steps, and which changes were kept."""
        console = session.console()
        metrics = [gate.metric for gate in self.gates]
        console.print(search_table(self.search, metrics))
        for line in result_lines(self.search, self.sentence, self.config):
            session.print_line(line, console)
        sys.stdout.flush()


def tune_config(
    opened: OpenedRun,
    data: DividedData,
    gates: Sequence[Gate],
    path: Path,
    *,
    minutes: float,
    targets: Sequence[str],
    deploy: Sequence[str] = (),
    tested: tuple[Mapping[str, float], Plan] | None = None,
    gives_advice: bool = False,
) -> TunedRun:
    """Change the config of a run until the gates hold. Write the best config, and calibrate and
    test it as `--quant_mode` does.

    Args:
        opened: the model and its data.
        data: that calibrate and test.
        gates: that have to hold.
        path: where the config is written.
        minutes: the time after which no trial is measured.
        targets: that have to be able to hold each config.
        deploy: the targets that the test exports to. Trials imitate their runtimes.
        tested: the metrics of the config as it is, and its plan; None to measure it.
        gives_advice: whether the test says what to do if a gate does not hold.

    Raises:
        UsageError: a target cannot hold the config, or there is no metric of a gate.
        QuantizerError: the config cannot be measured, or a mode failed.
    """
    options = data.calib_options
    read = session.read_config_file(options.config_file)
    subject = Subject(options, read, opened.loaded, data.calibration, opened.graph)
    context = SearchContext(subject, data.evaluation, gates, targets=targets, run_as=deploy)
    search = _searched(context, minutes, tested)
    if gives_advice and not search.figures.is_met:
        opened = opened.changed(improvement=_advice(search))
    folder = from_start(options.output_dir)
    mark_result_folder(folder)
    _write_config(path, read, search)
    data = data.with_config(str(path))
    calib_options = data.calibrating(fast_finetune=search.best.fast_finetune)
    test_options = data.testing(for_=(), deploy=tuple(deploy))
    opened = opened.with_batches(data.calibration)
    seed_everything(options.seed)
    calibrated = run_calib(calib_options, opened=opened)
    seed_everything(options.seed)
    outcome = run_test(test_options, opened=opened)
    run = TunedRun(
        search,
        gates,
        data.sentence,
        minutes,
        str(path),
        opened,
        calibrated,
        outcome,
        test_options,
    )
    info = read_info(folder)
    with locked_as_opened(info.files):
        write_json(folder / TUNE_FILE, info.with_checksum(run.content))
    return run


def _searched(
    context: SearchContext, minutes: float, tested: tuple[Mapping[str, float], Plan] | None
) -> Search:
    """Search for a config with which the gates hold."""
    subject = context.subject
    start = Trial(subject.read.config.document, subject.options.fast_finetune)
    refusal = context.refusal(plan_of(start, subject.original), start.config.algorithms)
    if refusal:
        raise UsageError(refusal, help="start from a config that this target can hold")
    figures: Figures | None = None
    if tested is not None:
        figures = context.figures(*tested)
    print_step = partial(_print_step, [gate.metric for gate in context.gates])
    search = Search(context, STEPS, 60 * minutes, after_row=print_step)
    with context.shown_as("tune"):
        search.run(start, figures)
    return search


def _print_step(metrics: Sequence[str], row: Row) -> None:
    """Print a line about a step after it is done."""
    if row.figures is None:
        say_note(f"{row.step}: not tried: {'; '.join(row.reasons)}")
        return
    texts = []
    for metric in metrics:
        value = row.figures.gated.get(metric, math.nan)
        texts.append(f"{metric} {value:.6g}")
    change = row.change or "the config as it is"
    result = "" if row.step == START else f": {row.result}"
    say_note(f"{row.step}: {change}: {', '.join(texts)}{result}")


def _advice(search: Search) -> str:
    """Return what to do next, after a search with which a gate does not hold."""
    if search.figures.missed_by_float:
        gates = ", ".join(search.figures.missed_by_float)
        return f"relax the bound of {gates}: the float network does not meet it either."
    if search.is_out_of_time:
        return "give more --minutes: the time was up before all changes were tried."
    return (
        "no change of the config meets the gate, and tune.json has what was tried: relax the "
        "bound, or choose another preset."
    )


def _write_config(path: Path, read: ReadConfig, search: Search) -> None:
    """Write the config of the best trial, with comments that say what was changed.

    Raises:
        ResultError: it cannot be written.
    """
    best = search.best
    document = with_tuning_comments(best.document, search.changes, best.fast_finetune)
    text = read.text_of(document)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(read.encoding))
    except OSError as error:
        raise cannot_use(path.parent, error) from None
