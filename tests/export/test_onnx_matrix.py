"""Every operator with every kind of activation, weight and bias, at every operator set, in a
default session.

One file holds all operators side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import fitted, outputs_of
from support.extended import extended
from torch import Tensor, nn
from torch.nn import functional as F

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import as_run, export
from quantizer.graph.ir import Graph, Node
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.storage.permission import replacing

UNSIGNED: dict[str, Any] = {"symmetric": False, "signed": False}
CHANNELS: dict[str, Any] = {"qscheme": "per_channel", "ch_axis": 0}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "int8": {},
    "uint8": UNSIGNED,
    "narrow": {"narrow_range": True},
    "int4": {"bit_width": 4},
    "uint5": {"bit_width": 5} | UNSIGNED,
    "half_up": {"round_mode": "half_up", "scale_type": "poweroftwo"},
    "int16": {"bit_width": 16},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "channels": CHANNELS,
    "tensor": {},
    "asymmetric": CHANNELS | UNSIGNED,
    "int4": CHANNELS | {"bit_width": 4},
    "int4 tensor": {"bit_width": 4},
}
BIASES: dict[str, dict[str, Any] | None] = {
    "float bias": {},
    "no bias": None,
    "int8 bias": {"bit_width": 8},
    "int16 bias": {"bit_width": 16},
}
LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "conv": lambda bias: nn.Conv2d(8, 8, 3, padding=1, bias=bias),
    "strided": lambda bias: nn.Conv2d(8, 6, 3, stride=2, bias=bias),
    "depthwise": lambda bias: nn.Conv2d(8, 8, 3, groups=8, bias=bias),
    "transposed": lambda bias: nn.ConvTranspose2d(8, 5, 3, bias=bias),
    "conv relu6": lambda bias: nn.Sequential(nn.Conv2d(8, 8, 3, bias=bias), nn.ReLU6()),
    "linear": lambda bias: nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 16, bias=bias)),
    "linear of rows": lambda bias: nn.Sequential(nn.Flatten(2), nn.Linear(36, 16, bias=bias)),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.transpose(-2, -1),
    "attention": lambda x: (x @ x.transpose(-2, -1) / 4).softmax(-1) @ x,
    "add": lambda x: x + x.flip(-1),
    "concat": lambda x: torch.cat([x, x.flip(-1)], 1),
    "reshape": lambda x: x.reshape(-1, 12, 24).transpose(1, 2) + 1,
    "average": lambda x: F.avg_pool2d(x, 2),
    "largest": lambda x: F.max_pool2d(x, 2),
}


@dataclass(frozen=True)
class Setting:
    """How all branches of a network are quantized."""

    activation: str
    weights: str = "channels"
    bias: str = "float bias"


class Branch(nn.Module):
    """An activation of its own, and what reads it."""

    def __init__(self, reader: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(x * 2)


class Branches(nn.Module):
    """Operators side by side."""

    def __init__(self, readers: Iterable[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(map(Branch, readers))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.branches]


def layer_settings(opset: int) -> list[Setting]:
    """Return every kind of activation, and every kind of weight, with biases in turn."""
    biases = cycle(BIASES)
    settings = [Setting(name, bias=next(biases)) for name in ACTIVATIONS]
    settings += [Setting("uint8", name, next(biases)) for name in WEIGHTS]
    return half(settings, opset)


def function_settings(opset: int) -> list[Setting]:
    """Return every kind of activation."""
    return half([Setting(name) for name in ACTIVATIONS], opset)


def half(settings: list[Setting], opset: int) -> list[Setting]:
    """Return every second setting for 20 and 23, the others for 18 and 21."""
    chosen = settings[1::2] if opset in (20, 23) else settings[::2]
    return [setting for setting in chosen if setting.activation != "int16" or opset >= 21]


def quantized(graph: Graph, setting: Setting, x: Tensor) -> Solution:
    """Return all branches with the specs of a setting, on the ranges of one call."""
    values: dict[str, Tensor] = {}
    network = Network(graph)
    with torch.no_grad():
        network.observe(
            (x,),
            {},
            {
                node.name: _keep(values, node.name)
                for node in graph.nodes
                if _is_made(graph, node)
            },
        )
    tensors: dict[Any, Any] = {}
    for node in graph.nodes:
        if not node.scope.startswith("branches."):
            continue
        if node.name in values:
            spec = QuantizationSpec(**ACTIVATIONS[setting.activation])
            tensors[node.name, "activation"] = fitted(values[node.name], spec)
        if "weight" in node.params:
            spec = QuantizationSpec(**WEIGHTS[setting.weights])
            tensors[node.name, "weights"] = fitted(graph.weight(node), spec)
        if "bias" in node.params and BIASES[setting.bias]:
            tensors[node.name, "bias"] = fitted(
                graph.tensors[node.params["bias"]], QuantizationSpec(**BIASES[setting.bias])
            )
    return Solution(tensors)


def _keep(values: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    return lambda value: values.update({name: value})


def _is_made(graph: Graph, node: Node) -> bool:
    """Whether a node makes new values, and not what an activation function after it cuts
    off.
    """
    cut = any(graph.by_name[name].op == "relu6" for name in graph.consumers[node.name] if name)
    return node.row.kind not in ("structural", "passthrough") and not cut


OPSETS = pytest.mark.parametrize(
    "opset",
    [
        pytest.param(21, marks=pytest.mark.slow),
        pytest.param(20, marks=pytest.mark.real),
        *extended(18, 23),
    ],
)
"""21 is the set from which optimizers do otherwise."""


@OPSETS
def test_layers_are_test_modes_in_a_default_session(opset: int, tmp_path: Path) -> None:
    wrong: dict[Any, str] = {}
    for setting in layer_settings(opset):
        torch.manual_seed(opset)
        has_bias = setting.bias != "no bias"
        network = Branches([make(has_bias) for make in LAYERS.values()])
        for name, text in differences(network, setting, opset, tmp_path).items():
            wrong[list(LAYERS)[name], setting] = text
    assert not wrong


@OPSETS
def test_functions_are_test_modes_in_a_default_session(opset: int, tmp_path: Path) -> None:
    wrong: dict[Any, str] = {}
    for setting in function_settings(opset):
        torch.manual_seed(opset)
        network = Branches(FUNCTIONS.values())
        for name, text in differences(network, setting, opset, tmp_path).items():
            wrong[list(FUNCTIONS)[name], setting] = text
    assert not wrong


def differences(
    network: nn.Module, setting: Setting, opset: int, folder: Path
) -> dict[int, str]:
    """Return the branches that a default session computes otherwise than test mode, by
    index.
    """
    x = torch.randn(4, 8, 6, 6)
    graph = trace(network.eval(), (x,))
    solution = quantized(graph, setting, x)
    given = Deployment(graph, solution, (x,), {}, opset, sqnr_db=20.0)
    path = folder / "net.onnx"
    with replacing(overwrite=True):
        assert export("onnx", given, path).default_session is not None
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    deployed = Deployment(graph, as_run(["onnx"], graph, solution), (x,), {})
    expected = outputs_of(deployed)
    wrong: dict[int, str] = {}
    for index, step in enumerate(given.steps):
        difference = (expected[index] - torch.from_numpy(outputs[index])).abs()
        one_step = 1.001 * step if step is not None else 1e-5
        most = float(difference.max())
        share = float((difference > 1e-6).float().mean())
        # Weights of 4 bits make sums that are half-way between two codes more often.
        if most > one_step or share > 0.02:
            wrong[index] = f"{most / one_step:.3g} steps, {share:.2%}"
    return wrong
