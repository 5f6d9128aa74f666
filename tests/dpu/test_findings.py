"""A warning before calibration if the DPU runs little of a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import ROOT

from quantizer.cli.main import run_command

MODEL = """
import torch
from torch import nn

def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

def sequences():
    return nn.Sequential(nn.Conv1d(5, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))

def images():
    return nn.Sequential(nn.Conv2d(5, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

def calibration_data():
    torch.manual_seed(0)
    return [torch.randn(2, 5, 16)]

def pictures():
    return [torch.randn(2, 5, 8, 8)]
"""


@pytest.mark.parametrize(
    ("factory", "data", "expected"),
    [
        ("encoder", "calibration_data", "a transformer encoder loses most of its accuracy"),
        ("sequences", "calibration_data", "the DPU runs 0 of 2 convolutions and linear layers"),
        ("images", "pictures", ""),
    ],
)
def test_plan_says_what_the_dpu_does_not_run(
    factory: str, data: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nets.py"
    file.write_text(MODEL)
    config = str(ROOT / "configs" / "dpu.json")
    words = ["--config_file", config, "--model", f"{file}:{factory}"]
    assert run_command(["plan", *words, "--data", f"{file}:{data}"]) == 0
    text = " ".join(capsys.readouterr().err.split())
    assert ("QZ357" in text) == bool(expected)
    assert expected in text
