"""An LSTM with projections says nothing of oneDNN, in any command or in Python; other warnings
are seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fresh_processes
from support.fresh_processes import QUANTIZER

MODEL = """
import warnings

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, proj_size=3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def model():
    warnings.warn("mind the gap")
    return Net().eval()


def calibration_data():
    return [torch.randn(4, 5, 4) for _ in range(2)]


def evaluate(model, data):
    for batch in data:
        model(batch)
    return {"top1": 1.0}
"""
PYTHON = """
import quantizer, torch
from net import calibration_data, model
torch.manual_seed(5)
net = model()
STEP
"""
CONFIG = (
    '{"global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}}'
)
TRACED = (
    f"quantizer.calibrate(net, quantizer.Config.from_dict({CONFIG}), calibration_data()).test()"
)
IN_PLACE = (
    f"quantizer.ModelQuantizer(quantizer.Config.from_dict({CONFIG})).quantize_model(net, "
    "calibration_data())"
)


def said(folder: Path, code: str, *words: str) -> str:
    """What a fresh process says on standard error, as torch warns once in each."""
    done = fresh_processes.run(code, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


@pytest.mark.slow
def test_commands(folder: Path) -> None:
    """Whether a command runs the model or reads the graph of the results."""
    calibration = ["--quant_mode", "calib"]
    for command in (
        ["--quant_mode", "float"],
        calibration,
        ["--quant_mode", "test"],
        ["analyze"],
        ["plan"],
    ):
        text = said(folder, QUANTIZER, *command, "--model", "net.py")
        assert "oneDNN" not in text, command
        assert "mind the gap" in text, command


@pytest.mark.slow
@pytest.mark.parametrize("step", [TRACED, IN_PLACE], ids=["traced", "in place"])
def test_python(step: str, folder: Path) -> None:
    text = said(folder, PYTHON.replace("STEP", step))
    assert "oneDNN" not in text
    assert "mind the gap" in text
