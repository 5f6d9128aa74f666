"""Writes the result of a climb for `quantizer run --gate` and `quantizer tune`: the config, its
calibration and test, tune.json and the table. Both commands also share fields of options here.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.cli import session
from quantizer.cli.calib_mode import run_calib
from quantizer.cli.gate_judge import GateJudge
from quantizer.cli.options import Options, option
from quantizer.cli.outcome import Outcome
from quantizer.cli.places import PathType, minutes
from quantizer.cli.session import OpenedRun, ReadConfig
from quantizer.cli.test_mode import run_test
from quantizer.config.forms.tuned import with_tuning_comments
from quantizer.evaluation.ladder.climb import Climb
from quantizer.report.ladder_table import climb_json, ladder_table, result_lines
from quantizer.results.folder import TUNE_FILE, read_info
from quantizer.results.result_set import locked_as_opened
from quantizer.seeding import seed_everything
from quantizer.storage.files import cannot_use, write_json
from quantizer.storage.replacing import replace_file

TUNED_CONFIG = "tuned_config.json"
"""The name of the written config if the climb started from a file of the user."""


def minutes_option(text: str) -> Any:
    """Return the field of `--minutes`, whose help is this text."""
    return option(text, default=10.0, type=minutes, metavar="N", group="Algorithm")


def results_folder_option(text: str) -> Any:
    """Return the field of `--output_dir`, also `-o`, whose help is this text."""
    return option(
        text, "-o", default="quantize_result", type=PathType(), metavar="DIR", group="Output"
    )


def with_advice(opened: OpenedRun, climb: Climb) -> OpenedRun:
    """Return the run with what to do next, for a climb after which a gate does not hold.

    Its test prints that.
    """
    text = (
        "no change of the config meets the gate, and tune.json has what was tried: relax the "
        "bound, or choose another preset."
    )
    if climb.judged.missed_by_float:
        gates = ", ".join(climb.judged.missed_by_float)
        text = f"relax the bound of {gates}: the float network does not meet it either."
    elif climb.is_out_of_time:
        text = "give more --minutes: the time was up before all changes were tried."
    return opened.changed(improvement=text)


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
        calibrated: the result of calib mode.
        tested: the result of test mode.
        test_options: the options of the test.
    """

    calibrated: Outcome
    tested: Outcome
    test_options: Options


def run_tuned(
    judge: GateJudge, climb: Climb, path: Path, opened: OpenedRun, *, deploy: Sequence[str] = ()
) -> TunedRun:
    """Write the config of the best rung, then calibrate and test it as `--quant_mode` does.

    Both write their results into the folder of the run.

    Args:
        judge: that measured the climb.
        climb: the rungs and the best of them.
        path: where the config is written.
        opened: the model and its data.
        deploy: the targets that the test exports to.

    Raises:
        QuantizerError: a mode failed.
    """
    write_config(path, judge.start_config, climb)
    data = judge.data.with_config(str(path))
    calib_options = data.calibrating(fast_finetune=climb.rung.fast_finetune)
    test_options = data.testing(for_=(), deploy=tuple(deploy))
    opened = opened.with_batches(data.calibration)
    seed_everything(calib_options.seed)
    calibrated = run_calib(calib_options, opened=opened)
    seed_everything(calib_options.seed)
    tested = run_test(test_options, opened=opened)
    return TunedRun(calibrated, tested, test_options)


@dataclass(frozen=True)
class Tuning:
    """A climb whose best config is written.

    Attributes:
        climb: the rungs that were tried, and the best of them.
        judge: that measured them.
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

    def show(self) -> None:
        """Print the table of the steps, and which changes were kept."""
        console = session.console()
        metrics = [gate.metric for gate in self.judge.gates]
        console.print(ladder_table(self.climb, metrics))
        for line in result_lines(self.climb, self.judge.data.sentence, self.config):
            session.print_line(line, console)
        sys.stdout.flush()
