"""Every operator with every kind of activation, weight and bias, at every operator set, in a
default session.

One file holds all kinds side by side, so that torch.onnx runs once for each operator set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import fitted
from torch import Tensor, nn
from torch.nn import functional as F

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export import as_run, export
from quantizer.export.deployment import Deployment
from quantizer.graph.ir import Graph, Node
from quantizer.graph.trace import trace
from quantizer.nn.network import Network

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
class Kind:
    """What one branch of the network is, and how it is quantized."""

    what: str
    activation: str
    weights: str = "channels"
    bias: str = "float bias"


class Branch(nn.Module):
    """An activation of its own, and what reads it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.what = kind.what
        if kind.what in LAYERS:
            self.layer = LAYERS[kind.what](kind.bias != "no bias")

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.layer(x) if self.what in LAYERS else FUNCTIONS[self.what](x)  # type: ignore[no-any-return]


class Branches(nn.Module):
    """All kinds side by side."""

    def __init__(self, kinds: list[Kind]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(map(Branch, kinds))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [branch(x) for branch in self.branches]


def kinds(opset: int) -> Iterator[Kind]:
    """Every operator with every kind of activation, and layers with every kind of weight,
    biases in turn.
    """
    activations = [name for name in ACTIVATIONS if name != "int16" or opset >= 21]
    biases = cycle(BIASES)
    yield from (
        Kind(what, name, bias=next(biases)) for what, name in product(LAYERS, activations)
    )
    yield from (
        Kind(what, "uint8", name, next(biases)) for what, name in product(LAYERS, WEIGHTS)
    )
    yield from (Kind(what, name) for what, name in product(FUNCTIONS, activations))


def quantized(graph: Graph, found: list[Kind], x: Tensor) -> Solution:
    """Each branch with its specs, on the ranges of one call."""
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
        kind = found[int(node.scope.split(".")[1])]
        if node.name in values:
            spec = QuantizationSpec(**ACTIVATIONS[kind.activation])
            tensors[node.name, "activation"] = fitted(values[node.name], spec)
        if "weight" in node.params:
            spec = QuantizationSpec(**WEIGHTS[kind.weights])
            tensors[node.name, "weights"] = fitted(graph.weight(node), spec)
        if "bias" in node.params and BIASES[kind.bias]:
            tensors[node.name, "bias"] = fitted(
                graph.tensors[node.params["bias"]], QuantizationSpec(**BIASES[kind.bias])
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


@pytest.mark.parametrize(
    "opset",
    [
        pytest.param(18, marks=pytest.mark.real),
        pytest.param(20, marks=pytest.mark.slow),
        pytest.param(21, marks=pytest.mark.slow),
        pytest.param(23, marks=pytest.mark.real),
    ],
)
def test_every_kind_is_test_modes_in_a_default_session(opset: int, tmp_path: Path) -> None:
    """Every second kind at 18 and 21, the others at 20 and 23: 21 is the set from which
    optimizers do otherwise.
    """
    torch.manual_seed(opset)
    found = list(kinds(opset))[opset in (20, 23) :: 2]
    x = torch.randn(4, 8, 6, 6)
    graph = trace(Branches(found).eval(), (x,))
    solution = quantized(graph, found, x)
    given = Deployment(graph, solution, (x,), {}, opset, sqnr_db=20.0)
    verified = export("onnx", given, tmp_path / "net.onnx").default_session
    assert verified is not None
    session = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = Deployment(graph, as_run(["onnx"], graph, solution), (x,), {}).expected
    steps = Deployment(graph, solution, (x,), {}).steps
    wrong = {}
    for kind, want, got, step in zip(
        found, expected, map(torch.from_numpy, outputs), steps, strict=True
    ):
        difference = (want - got).abs()
        one_step = 1.001 * step if step is not None else 1e-5
        if (
            float(difference.max()) > one_step
            or float((difference > 1e-6).float().mean()) > 0.01
        ):
            wrong[kind] = (
                f"{float(difference.max() / one_step):.3g} steps, "
                f"{float((difference > 1e-6).float().mean()):.2%}"
            )
    assert not wrong
