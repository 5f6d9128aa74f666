"""The digits example where the system has nothing that Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.runs import DIGITS, EXAMPLE, ROOT
from support.without_posix import RUN

OF_ONE_RUN = {"run.json", "run.log"}


def run(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_calibration_and_test_need_no_posix(calibrated_once: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    common = ["--model", DIGITS, "--output_dir", str(folder), "-q", "--subset_len", "64"]
    calibration = ["--quant_mode", "calib", "--config_file", EXAMPLE, *common]
    run(*calibration)
    names = {path.name for path in calibrated_once.iterdir()} - OF_ONE_RUN
    assert {path.name for path in folder.iterdir()} - OF_ONE_RUN == names
    for name in names:
        assert (folder / name).read_bytes() == (calibrated_once / name).read_bytes(), name
    run("--quant_mode", "test", *common)
    assert (folder / "report.json").exists()
    before = (folder / "quant_info.json").read_bytes()
    run("retune", str(folder), "--method", "maxmin")
    assert (folder / "quant_info.json").read_bytes() != before
