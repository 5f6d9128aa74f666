"""`-q`: no command prints a table or a note, and verdicts stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.cli.main import run_command

NET = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
def calibration_data():
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0)))
"""
GIVEN = ["--config_file", "net.json", "--model", "net.py"]
PRINTED = (
    (["calib", *GIVEN], "tensors calibrated on 4 batches; results: quantize_result"),
    (["test", "--model", "net.py", "--gate", "sqnr_db>=5"], "PASS: gate sqnr_db>=5: met"),
    (["plan", *GIVEN], "tensors quantized; weights"),
    (["plan", *GIVEN, "--to", "onnx"], "tensors quantized; weights"),
    (["inspect", "--model", "net.py"], ""),
    (["inspect", "--model", "net.py", "--algorithms"], ""),
    (
        ["inspect", "--model", "net.py", "--to", "DPU", "--gate", "cpu_operators<=9"],
        "PASS: gate cpu_operators<=9: met (0)",
    ),
    (["analyze", *GIVEN, "--tensors"], "dB"),
    (["analyze", *GIVEN, "--budget", "4", "-o", "mixed.json"], "config: mixed.json"),
    (["tune", *GIVEN, "--gate", "sqnr_db>=5", "-o", "tuned"], "PASS: gate sqnr_db>=5: met"),
    (["diff", "quantize_result", "tuned"], "differ"),
    (["retune", "--statistic", "mean"], "tensors retuned; results: quantize_result"),
    (["doctor", *GIVEN], ""),
    (["validate", "net.json"], ""),
)
HEADS = ("layer ", "rule ", "step ", "ok ", "note ", "warning ", "Inputs that", "blocks")
"""What lines of tables and notes begin with."""


def test_warnings_about_the_config_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    assert run_command(["init", "--preset", "cpu_int8", "-o", "net.json"]) == 0
    config = json.loads(Path("net.json").read_text())
    config["overall_quantize_config"]["per_channel"] = True
    Path("net.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert run_command(["calib", *GIVEN, "-q"]) == 0
    assert "warning QZ112: per_channel applies to weights only" in capsys.readouterr().err


def test_no_command_prints_tables_or_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    assert run_command(["init", "--preset", "default", "-o", "net.json"]) == 0
    for words, expected in PRINTED:
        capsys.readouterr()
        assert run_command([*words, "-q"]) == 0, words
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        assert not [line for line in lines if line.startswith(HEADS)], words
        assert bool(lines) == bool(expected), words
        assert expected in printed.out, words
        assert "note:" not in printed.err, words
