"""Calibration that reads no data: what it says of options and of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import ROOT, calibrate

MODEL = """
import torch

def model():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8)
    with torch.no_grad():
        linear.weight[0, :3] = 1e6
    return torch.nn.Sequential(linear)

def calibration_data():
    return [torch.ones(2, 8)]
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return str(path)


def test_resume_says_that_it_has_no_effect(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "weight_int8.json")
    assert calibrate(tmp_path / "out", "--resume", model=model, config=config) == 0
    assert "--resume has no effect" in capsys.readouterr().err


def test_weights_that_a_cast_cuts_off_are_counted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "half.json"
    config.write_text(json.dumps({"global_quant_config": {"weight": {"dtype": "float16"}}}))
    assert calibrate(tmp_path / "out", model=model, config=str(config)) == 0
    assert "3 of 64 values are beyond 65504" in capsys.readouterr().err


def test_a_rotation_needs_no_data_but_what_comes_after_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "net.py", tmp_path / "rotated.json"
    path.write_text(
        MODEL.partition("def calibration_data")[0]
        + "def example_input():\n    return torch.ones(2, 8)\n"
    )
    content: dict[str, Any] = {
        "global_quant_config": {"weight": {"dtype": "int8"}},
        "algo_config": {"name": "rotation"},
    }
    config.write_text(json.dumps(content))
    assert calibrate(tmp_path / "out", model=str(path), config=str(config)) == 0
    assert "quantized without data" in capsys.readouterr().out
    config.write_text(
        json.dumps(content | {"algo_config": [{"name": "rotation"}, {"name": "gptq"}]})
    )
    assert calibrate(tmp_path / "other", model=str(path), config=str(config)) == 2
    assert "Missing option '--data'" in capsys.readouterr().err
