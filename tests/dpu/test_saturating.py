"""Values that only saturating functions read: a power-of-two scale need not reach those that the
functions do not tell apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.errors import DataError

DPU = json.loads((ROOT / "configs" / "dpu.json").read_text("utf-8")) | {
    "$schema": str(ROOT / "schemas" / "layered.schema.json"),
    # An input of the same range would lose as much as the logits
    "quantizable_data_type": ["weights", "bias", "activation"],
}
SPREAD = 24.0


class Logits(nn.Module):
    """A linear layer whose outputs are its input, and a function of them."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(8))
            self.fc.bias.zero_()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(self.fc(x))


def batches() -> list[Tensor]:
    """Values as far as 24 from zero, of which most are near."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    x[:, 0] = torch.linspace(-SPREAD, SPREAD, 64)
    return [x]


def calibrated(function: Callable[[Tensor], object]) -> quantizer.Result:
    return quantizer.calibrate(Logits(function), DPU, batches())


def position(result: quantizer.Result, folder: Path) -> int:
    """Of the linear layer's output."""
    result.save(folder)
    tensors = json.loads((folder / "quant_info.json").read_text("utf-8"))["tensors"]
    [name] = [name for name in tensors if name.endswith("linear")]
    found: int = tensors[name]["activation"]["position"]
    return found


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # 127/16 is the largest value at position 4, and a sigmoid of it is 0.9996
        (torch.sigmoid, 4),
        (lambda y: y.view(-1, 2, 4).sigmoid(), 4),
        (torch.tanh, 5),
        (nn.functional.hardsigmoid, 5),
        # Others read the values, too
        (lambda y: (y.sigmoid(), y.relu()), 2),
        (lambda y: y * y.sigmoid(), 2),
        (lambda y: (y.sigmoid(), y + 1), 2),
    ],
    ids=["sigmoid", "moved", "tanh", "hardsigmoid", "relu", "silu", "sum"],
)
def test_the_range_ends_where_readers_saturate(
    function: Callable[[Tensor], object], expected: int, tmp_path: Path
) -> None:
    assert position(calibrated(function), tmp_path) == expected


def test_what_is_cut_off_is_no_loss() -> None:
    comparison = calibrated(torch.sigmoid).test()
    layers = comparison.to_json()["layers"]
    [row] = [row for row in layers if row["tensor"] == "activation"]
    assert row["local_sqnr_db"] > 30
    # Twelve less at position 2, whose steps are four times as large
    assert comparison.metrics["sqnr_db"] > 40


def test_infinity_is_still_an_error() -> None:
    model = Logits(torch.sigmoid)
    with torch.no_grad():
        model.fc.weight[0, 0] = 3e38
    with pytest.raises(DataError, match=r"linear: .* infinite"):
        quantizer.calibrate(model, DPU, batches())
