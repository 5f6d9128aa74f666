"""A process where the system has nothing that Windows lacks, and knows ASCII alone: the digits
example leaves the bytes that it leaves elsewhere, and names in other letters end no run.

All commands run in one process, as each would import torch again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import DIGITS, EXAMPLE, ROOT
from support.without_posix import RUN_EACH
from test_file_names import ODD, folder_of_such_a_name

HAVE_THE_CODE = {
    *("graph.json", "quant_info.json", "checksums.json", "report.json", "report.html")
}
"""Files with the digest of the code that a process has loaded. This process has loaded more."""
OF_ONE_RUN = {"run.json", "run.log", ".quantizer.json"}
ASCII = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONIOENCODING": "ascii",
    "PYTHONCOERCECLOCALE": "0",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the digits' results, with a copy after each command beside it."""
    return tmp_path_factory.mktemp("bare") / "out"


@pytest.fixture(scope="module")
def printed(results: Path, calibrated_once: Path) -> bytes:
    """What the commands have printed; the last one is about files of odd names."""
    folder = folder_of_such_a_name(results.parent)
    common = ["--model", DIGITS, "--output_dir", str(results), "-q", "--subset_len", "64"]
    commands = [
        ["--quant_mode", "calib", "--config_file", EXAMPLE, *common],
        ["--quant_mode", "test", *common],
        ["retune", str(results), "--method", "maxmin"],
    ]
    model, config = str(folder / f"{ODD}.py"), str(folder / f"{ODD}.json")
    last = ["--quant_mode", "calib", "--model", model, "--config_file", config]
    last += ["--output_dir", str(folder / f"{ODD}out")]
    program = [sys.executable, "-W", "ignore", "-c", RUN_EACH]
    environment = {**os.environ, **ASCII, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*program, json.dumps([str(results), commands]), *last],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def after(results: Path, number: int) -> Path:
    """Return the copy that was made after the command of this number."""
    return results.with_name(f"{results.name}.{number}")


@pytest.mark.slow
@pytest.mark.usefixtures("printed")
def test_calibration_and_test_need_no_posix(calibrated_once: Path, results: Path) -> None:
    calibrated, tested, retuned = (after(results, number) for number in range(3))
    names = {path.name for path in calibrated_once.iterdir()} - OF_ONE_RUN
    assert {path.name for path in calibrated.iterdir()} - OF_ONE_RUN == names
    for name in names - HAVE_THE_CODE:
        content = (calibrated_once / name).read_bytes()
        assert (calibrated / name).read_bytes() == content, name
    infos = [
        json.loads((at / "quant_info.json").read_text()) for at in (calibrated_once, calibrated)
    ]
    assert infos[0]["tensors"] == infos[1]["tensors"]
    assert json.loads((tested / "report.json").read_text("utf-8"))["metrics"]["sqnr_db"] > 20
    before = (calibrated / "quant_info.json").read_bytes()
    assert (tested / "quant_info.json").read_bytes() == before
    assert (retuned / "quant_info.json").read_bytes() != before


def test_an_ascii_terminal(printed: bytes) -> None:
    line = printed.splitlines()[-2]
    assert b"tensors calibrated on 1 batch; results: " in line
    assert line.endswith(b"/d\\udce9/d\\udce9out")
