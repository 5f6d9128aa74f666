"""Products with trained matrices become linear layers: their weights have channels, their
biases are biases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.configs import config, document
from support.toys import traced
from torch import Tensor, nn

from quantizer.config.model import Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.passes.linear_layers import linear_from_matmul
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan

P = "Products::Products/"


def test_products_become_linear_layers_and_scaled_ones_stay(tmp_path: Path) -> None:
    graph = run_passes(traced("products"), Settings())
    ops = {node.name.removeprefix(P): node.op for node in graph.nodes}
    assert {name: ops[name] for name in ("addmm", "matmul", "addmm.1", "addmm.2")} == {
        "addmm": "linear",
        "matmul": "linear",
        "addmm.1": "addmm",
        "addmm.2": "linear",
    }
    # The scaled product still reads the others
    assert graph.absorbed == {P + "second": P + "matmul"}
    settings = config(tmp_path, document(tensor={"weights": {"per_channel": True}}))
    plan = resolve_plan(settings, graph, traced("products"))
    assert set(plan.of_layer(P + "addmm")) == {"weights", "bias"}
    assert (
        plan.tensors[P + "addmm", "weights"].spec.ch_axis,
        plan.tensors[P + "addmm", "weights"].scales,
    ) == (0, 6)
    assert plan.tensors[P + "first", "weights"].spec.qscheme == "per_tensor"


FLIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda weight: weight.T,
    "mT": lambda weight: weight.mT,
    "t": lambda weight: weight.t(),
    "transpose": lambda weight: weight.transpose(-2, -1),
    "permute": lambda weight: weight.permute(1, 0),
}
STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose of one axis": lambda weight: weight.transpose(1, -1),
    "permute in order": lambda weight: weight.permute(0, 1),
}


class Flipped(nn.Linear):
    """A linear layer as Falcon writes it; square, so that no shape tells the two ways apart."""

    def __init__(self, flip: Callable[[Tensor], Tensor]) -> None:
        super().__init__(5, 5)
        self.flip = flip

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.flip(self.weight)) + x @ self.flip(self.weight)


@pytest.mark.parametrize("name", [*FLIPS, *STAYS])
def test_a_product_with_a_transpose_becomes_a_linear_layer_with_the_weight_itself(
    name: str,
) -> None:
    model, x = nn.Sequential(Flipped({**FLIPS, **STAYS}[name])), torch.randn(3, 5)
    graph = run_passes(trace(model, (x,), {}), Settings())
    layers = [node.params["weight"] for node in graph.nodes if node.op == "linear"]
    assert layers == (["0.weight"] * 2 if name in FLIPS else [])
    assert any(node.op == "parameter" for node in graph.nodes) == (name in STAYS)
    assert torch.allclose(Network(graph)(x), model(x), atol=1e-6)


def test_a_parameter_of_which_only_the_shape_is_read_stays() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))
            self.shift = torch.nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + torch.zeros_like(self.shift)

    graph = linear_from_matmul(trace(Model(), (torch.randn(2, 4),)))
    assert [node.op for node in graph.nodes if node.is_multiplying] == ["linear"]
