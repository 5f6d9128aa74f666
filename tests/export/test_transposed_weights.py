"""Weights of transposed convolutions with groups, whose scales lie along two axes, which
DequantizeLinear lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

import onnx
from support.configs import document

import quantizer

SIZES = ((6, 6, 6), (3, 6, 3), (12, 6, 6), (4, 6, 2))
"""Inputs, outputs and groups of each branch."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "int8": {},
    "uint8": {"symmetry": False, "signed": False},
    "int4": {"bit_width": 4},
}


class Branches(nn.Module):
    """Layers of all sizes, between quantized values and as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Conv2d(2, inputs, 1) for inputs, _, _ in SIZES)
        self.layers = nn.ModuleList()
        for inputs, outputs, groups in SIZES:
            self.layers.append(nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, groups=groups))
        self.after = nn.Conv2d(6, 3, 1)
        self.last = nn.ConvTranspose2d(3, 6, 2, groups=3)

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for before, layer in zip(self.before, self.layers, strict=True):
            outputs.append(self.last(self.after(layer(before(x)).relu())))
        return outputs


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    network = Branches().eval()
    with torch.no_grad():
        for layer in (*network.layers, network.last):
            layer.weight *= torch.logspace(0, -3, len(layer.weight)).view(-1, 1, 1, 1)
    return network


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "target"),
    [("int4", "onnx"), ("uint8", "pt2"), *extended(("uint8", "onnx"), ("int8", "onnx"))],
)
def test_a_file_has_the_values_of_test_mode(
    kind: str, target: str, model: nn.Module, tmp_path: Path
) -> None:
    weights = {"per_channel": True} | WEIGHTS[kind]
    config = document(
        tensor={"weights": weights, "bias": {"bit_width": 32}}, onnx_opset_version=21
    )
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(4, 2, 6, 6, generator=generator) for _ in range(2)]
    result = quantizer.calibrate(model, config, data)
    path = tmp_path / "file"
    assert result.export(target, path).equal == 1.0
    if target == "onnx":
        graph = onnx.load(path).graph
        names = [tensor.name for tensor in graph.initializer]
        stored = [
            name
            for name in names
            if name.endswith(".weights.codes") and "/ConvTranspose2d" in name
        ]
        assert len(stored) == 2 * len(SIZES), "each weight is stored as codes"
