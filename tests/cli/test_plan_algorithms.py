"""`quantizer plan` with algorithms in the config: it runs none, and checks the names in their
settings.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.cli.main import run_command

MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def calibration_data():
    return [torch.randn(4, 8)]
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    return ["plan", "--config_file", str(tmp_path / "config.json"), "--model", str(model)]


def write(folder: Path, *algorithms: dict[str, str]) -> None:
    content = {"global_quant_config": {"weight": {"dtype": "int4"}}, "algo_config": algorithms}
    (folder / "config.json").write_text(json.dumps(content))


def test_algorithms_are_told_in_order(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"name": "awq"}, {"name": "gptq"})
    assert run_command(command) == 0
    assert (
        "calibration runs awq, then gptq; layers that it inserts are not in the table"
        in capsys.readouterr().out
    )
    assert run_command([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithms"] == ["awq", "gptq"]


def test_names_are_checked(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"name": "gptq", "model_decoder_layers": "blocks"})
    assert run_command(command) == 2
    assert "error QZ501: there is no module 'blocks'" in capsys.readouterr().err


def test_calibration_checks_names_before_it_reads_data(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the batch that the model is traced with."""
    data = "    yield torch.randn(4, 8)\n    raise RuntimeError('read on')\n"
    (tmp_path / "model.py").write_text(MODEL.replace("    return [torch.randn(4, 8)]\n", data))
    words = ["--quant_mode", "calib", "--output_dir", str(tmp_path / "out"), *command[1:]]
    write(tmp_path, {"name": "awq", "model_decoder_layers": "blocks"})
    assert run_command(words) == 2
    assert "error QZ501: there is no module 'blocks'" in capsys.readouterr().err
    write(tmp_path, {"name": "awq"})
    assert run_command(words) != 0
    assert "read on" in capsys.readouterr().err
