"""`integer_activations`: activation functions and the convolutions before them run in integers
in a default session, as test mode computes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.configs import document
from support.generated import imported
from support.runs import ROOT
from torch import Tensor, nn

import quantizer

onnx = pytest.importorskip("onnx", reason="files are read with it (extra: onnx)")
ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

PRESET = ROOT / "configs" / "onnx_int8.json"
FLOAT_KERNELS = {"LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Mul", "Conv", "FusedConv"}
ACTIVATIONS = {
    "leaky": nn.LeakyReLU(0.1),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "sigmoid": nn.Sigmoid(),
}


class Net(nn.Module):
    """Two convolutions with an activation function after each.

    Args:
        is_returned: whether it is also what the network returns.
    """

    def __init__(self, activation: nn.Module, *, is_returned: bool = False) -> None:
        super().__init__()
        self.returned = activation if is_returned else nn.Identity()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 16, 3)
        self.activation, self.last = activation, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        x = self.activation(self.second(x)).mean((2, 3))
        return self.returned(self.last(x))


def kernels(path: Path) -> set[str]:
    """The operators of the graph that a default session runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.log_severity_level = 3
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    return {node.op_type for node in graph.node}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_default_session_has_integer_kernels_alone(name: str, tmp_path: Path) -> None:
    data = [torch.randn(4, 4, 8, 8) * 2 for _ in range(4)]
    model = Net(ACTIVATIONS[name]).eval()
    result = quantizer.calibrate(model, PRESET, data)
    found = result.export("onnx", tmp_path / "net.onnx", data)
    session = found.default_session
    assert session is not None and session.kernels is not None
    assert session.kernels.floating == {}
    assert not kernels(tmp_path / "net.onnx") & FLOAT_KERNELS
    assert session.first_differing is None


@pytest.mark.parametrize("name", ["leaky", "silu", "hardswish"])
def test_the_float_network_computes_the_same(name: str) -> None:
    model = Net(ACTIVATIONS[name], is_returned=True).eval()
    data = [torch.randn(4, 4, 8, 8)]
    config = document(integer_activations=True)
    config["quantizable_data_type"] = ["weights"]
    config["overall_quantize_config"]["bit_width"] = 16
    result = quantizer.calibrate(model, config, data)
    torch.testing.assert_close(result.network(*data), model(*data), atol=1e-3, rtol=1e-3)
    layers = [node.op for node in result.plan.plan.graph.nodes]
    expected = {"leaky": "leaky_relu", "silu": "silu", "hardswish": "hardswish"}[name]
    # What is returned stays as it is
    assert layers.count(expected) == 1


def test_generated_code_is_the_network(tmp_path: Path) -> None:
    data = [torch.randn(4, 4, 8, 8)]
    for name in ("leaky", "silu", "hardswish"):
        folder = tmp_path / name
        result = quantizer.calibrate(Net(ACTIVATIONS[name]).eval(), PRESET, data)
        result.save(folder)
        network = imported(folder / "Net.py").eval()
        assert torch.equal(network(*data), result.network(*data))


class Levels(nn.Module):
    """Sums and products of values that were moved: a finer map of a pyramid, and a gated half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fine, self.coarse = nn.Conv2d(4, 16, 1), nn.Conv2d(4, 16, 1, 2)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        up = nn.functional.interpolate(self.coarse(x), scale_factor=2.0)
        values, gate = (self.fine(x) + up).chunk(2, 1)
        return self.last(values * torch.sigmoid(gate))


def test_sums_and_products_of_moved_values_are_in_integers(tmp_path: Path) -> None:
    data = [torch.randn(4, 4, 8, 8) for _ in range(4)]
    result = quantizer.calibrate(Levels().eval(), PRESET, data)
    found = result.export("onnx", tmp_path / "net.onnx", data)
    used = kernels(tmp_path / "net.onnx")
    assert {"QLinearAdd", "QLinearMul"} <= used
    assert not used & {"Add", "Mul"}
    assert found.default_session is not None
    assert found.default_session.first_differing is None
