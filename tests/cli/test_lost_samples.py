"""Samples that loud ones hide: in calibration, the verdict, the report, gates, tune and diff."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT

from quantizer.cli.main import run_command

CORRUPT = """
    data = [torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    data[2][3] *= 1e5
    return data
"""
NET = "return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))"
Capture = pytest.CaptureFixture[str]
NAMED = r"1 sample of 128 stretches the range of .*input_0 .*: batch 2, sample 3"


@pytest.fixture
def model(toy: Callable[..., str]) -> str:
    return toy(data=CORRUPT.strip(), model=NET)


def read(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text("utf-8"))


def test_both_modes_say_it(model: str, tmp_path: Path, capsys: Capture) -> None:
    words = ["--model", model, "--output_dir", str(tmp_path / "out")]
    config = ["--config_file", str(ROOT / "configs" / "cpu_int8.json")]
    assert run_command(["--quant_mode", "calib", *words, *config]) == 0
    assert re.search(NAMED, capsys.readouterr().err)
    gates = ["--gate", "sqnr_db>=20", "--gate", "sqnr_db_worst>=20"]
    assert run_command(["--quant_mode", "test", *words, *gates[:2]]) == 0
    shown = capsys.readouterr()
    assert "gate sqnr_db>=20: met" in shown.out
    assert "but the worst samples have 0.0 dB: sqnr_db_worst bounds them" in shown.out
    assert "0.0 dB on the worst twentieth of 128 samples" in shown.err
    [row] = read(tmp_path / "out")["outputs"]
    assert row["sqnr_db"] > 30 > 1 > row["sqnr_db_median"] >= row["sqnr_db_worst"]
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "worst, dB" in page
    assert run_command(["--quant_mode", "test", *words, *gates]) == 1
    assert "not met: sqnr_db_worst>=20" in capsys.readouterr().err


def test_the_verdict_begins_with_ordinary_samples(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    # Else the last quarter judges, and the loud sample is not in it
    with Path(model).open("a") as file:
        file.write("\ndef evaluation_data():\n    return calibration_data()\n")
    gate = ["--gate", "sqnr_db>=20"]
    words = ["run", model, "--to", "pt2", "-o", str(folder), *gate]
    assert run_command(words) == 0
    shown = capsys.readouterr()
    assert re.search(NAMED, shown.err)
    [line] = [line for line in shown.out.splitlines() if "differs from float" in line]
    assert line.startswith("The output differs from float by 100 % (0.0 dB) on the worst")
    assert line.endswith("over all values; measured on the calibration data.")
    assert "gate sqnr_db>=20: met" in shown.out
    assert "the worst samples have 0.0 dB" in shown.out
    assert "analyze --tensors" in shown.out, "the output is lost"


def test_a_gate_needs_samples(toy: Callable[..., str], tmp_path: Path, capsys: Capture) -> None:
    body = "return Mean()\n\nclass Mean(torch.nn.Linear):\n    def __init__(self):\n"
    body += "        super().__init__(3, 2)\n    def forward(self, x):\n"
    body += "        return super().forward(x).mean(0)"
    words = ["--model", toy(model=body), "--output_dir", str(tmp_path / "out")]
    assert run_command(["--quant_mode", "calib", *words, "-q"]) == 0
    code = run_command(["--quant_mode", "test", *words, "--gate", "sqnr_db_worst>=20"])
    assert code == 2
    assert "no output has an axis whose size follows the batch" in capsys.readouterr().err


def test_diff_compares_the_worst_samples(model: str, tmp_path: Path, capsys: Capture) -> None:
    folders = []
    for bits in (4, 8):
        folder = tmp_path / str(bits)
        config = {"global_quant_config": {"weight": {"dtype": f"int{bits}"}}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = ["--model", model, "--output_dir", str(folder), "-q"]
        file = ["--config_file", str(tmp_path / "config.json")]
        assert run_command(["--quant_mode", "calib", *words, *file]) == 0
        assert run_command(["--quant_mode", "test", *words]) == 0
        folders.append(str(folder))
    capsys.readouterr()
    run_command(["diff", *folders])
    assert re.search(r"^sqnr_db_worst [\d.]+ → [\d.]+$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_tune_takes_a_gate_on_samples(
    toy: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    data = CORRUPT.replace("data[2][3] *= 1e5", "").strip()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"global_quant_config": {"weight": {"dtype": "int2"}}}))
    gates = ["--gate", "sqnr_db_worst>=10", "--minutes", "1"]
    words = ["tune", "--model", toy(data=data, model=NET), "--config_file", str(config)]
    assert run_command([*words, "--output_dir", str(tmp_path / "out"), *gates]) == 0
    assert "gate sqnr_db_worst>=10: met" in capsys.readouterr().out
