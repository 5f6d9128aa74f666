"""The trace that tests share is that of the model at hand: other code, attributes or constants
are traced anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.extended import extended_except
from support.shared_traces import SharedTraces
from support.toys import TOYS, built, traced

from quantizer.graph.tracing import trace as tracing
from quantizer.nn.network import Network

X = torch.arange(6.0).reshape(2, 3)


class Scaled(torch.nn.Module):
    """A parameter, a buffer that no file holds, a plain tensor, a number, a function."""

    def __init__(
        self, by: float = 2.0, table: float = 1.0, function: Callable[..., Any] = torch.relu
    ) -> None:
        super().__init__()
        self.layer, self.by, self.function = torch.nn.Linear(3, 3), by, function
        self.register_buffer("shift", torch.randn(3), persistent=False)
        self.table = torch.full((3,), table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x) * self.by + self.shift) + self.table


def enclosing(number: float) -> Callable[..., Any]:
    return lambda x: x * number


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are really exported, in a memory of its own."""
    seen: list[str] = []
    real = getattr(tracing._export, "export", tracing._export)

    def noted(module: torch.nn.Module, *call: Any, **options: Any) -> Any:
        seen.append(type(module).__name__)
        return real(module, *call, **options)

    monkeypatch.setattr(tracing, "_export", SharedTraces(noted))
    return seen


def test_models_of_other_values_share_a_trace_and_keep_their_values(
    exported: list[str],
) -> None:
    for _ in range(3):
        model = Scaled()
        assert torch.equal(Network(tracing.trace(model, (X,)))(X), model(X))
    assert exported == ["Scaled"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        lambda: Scaled(by=3.0),
        lambda: Scaled(table=5.0),
        lambda: Scaled(function=torch.tanh),
        lambda: Scaled(function=enclosing(3.0)),
        lambda: Scaled().eval(),
        lambda: type("Scaled", (Scaled,), {"forward": lambda self, x: self.layer(x)})(),
    ],
    ids=["number", "plain tensor", "function", "closure", "mode", "class"],
)
def test_other_models_are_traced_anew(
    other: Callable[[], torch.nn.Module], exported: list[str]
) -> None:
    for model in (Scaled(), Scaled(function=enclosing(2.0)), other()):
        assert torch.equal(Network(tracing.trace(model, (X,)))(X), model(X))
    assert len(exported) == 3


def test_inputs_of_another_shape_or_dtype_are_traced_anew(exported: list[str]) -> None:
    for x in (X, X[:, None], X.double()):
        model = Scaled().to(x.dtype)
        model.table = model.table.to(x.dtype)
        assert Network(tracing.trace(model, (x,)))(x).shape == x.shape
    assert len(exported) == 3


@pytest.mark.parametrize("name", extended_except(TOYS, "residual", "nested_inputs", "gated"))
def test_every_toy_is_found_again(name: str) -> None:
    toy, first, shared = built(name), traced(name), tracing._export
    known = len(shared.programs)
    again = tracing.trace(toy.module, toy.args, toy.kwargs)
    assert (again.nodes, again.output) == (first.nodes, first.output)
    assert all(torch.equal(value, first.tensors[path]) for path, value in again.tensors.items())
    assert len(shared.programs) == known
