"""Writes through views: the network computes what the model does, whatever reads the memory
before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network


def views_made_before(x: Tensor, y: Tensor) -> Tensor:
    first, part = x[:, 0], x[:, :2]
    row = part[:, 1]
    row += y[:, 1]
    first.mul_(3)
    return torch.cat([x.flatten(1), first, part.flatten(1), row], 1)


def parts_of_parts(x: Tensor, y: Tensor) -> Tensor:
    x[..., 1, 1:3][:, :2] = y[..., 0, :2]
    x[:, 2, ::2] = y[:, 2, 1::2]
    return x


def values_before(x: Tensor, y: Tensor) -> Tensor:
    before = x[:, 1] * 2
    x[:, 1] = before + x[:, 1]
    x[:, 1] = before + x[:, 1]
    return x


def results_of_writes(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0].add_(1).mul_(y[:, 0]).clamp_(-1, 1)
    return x.view(-1, 12) + x.transpose(1, 2).flatten(1)


def broadcast_numbers(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:] = 0
    x[:, 0] = y[0, 0]
    x[:, :, 3].fill_(2)
    return x


def masks(x: Tensor, y: Tensor) -> Tensor:
    parts = x.split([1, 2], 1)
    x[:, 1:].masked_fill_(y[:, 1:] > 0, 5)
    return parts[0] + parts[1]


def values_of_other_types(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(3, 4, dtype=torch.float16).expand(x.shape[0], 3, 4).clone()
    whole[:, 0] = y[:, 0]
    whole[:, 1].add_(y[:, 1])
    return whole.float()


def writes_before_views(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros_like(x, dtype=torch.float16).add_(y)
    whole[:, 0] = 1
    return whole.float()


def comparisons(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0].gt_(y[:, 0])
    return x


def writes_through_shapes(x: Tensor, y: Tensor) -> Tensor:
    x.view(-1, 12)[:, 3:5] = y[:, 0, :2]
    return x


def shapes_that_may_copy(x: Tensor, y: Tensor) -> Tensor:
    turned = x.transpose(1, 2).reshape(-1, 12)
    same = x.reshape(-1, 12)
    x[:, 0] = y[:, 1]
    return turned + same


ONE_TRACE = [
    writes_through_shapes,
    views_made_before,
    parts_of_parts,
    values_before,
    results_of_writes,
    broadcast_numbers,
    masks,
]
TORCH_DECOMPOSES = [
    values_of_other_types,
    writes_before_views,
    comparisons,
    shapes_that_may_copy,
]


class Writer(nn.Module):
    """A convolution, something written into its output [b, 3, 4], and the sum of the result."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(3, 3, 1)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.convolution(x), x)


@pytest.mark.parametrize("write", ONE_TRACE + TORCH_DECOMPOSES)
def test_the_network_computes_what_the_model_writes(
    write: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decomposed: list[ExportedProgram] = []
    run_decompositions = ExportedProgram.run_decompositions

    def recorded(program: ExportedProgram, table: Any) -> ExportedProgram:
        decomposed.append(program)
        return run_decompositions(program, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", recorded)
    model = Writer(write).requires_grad_(False)
    graph = trace(model, (torch.randn(2, 3, 4),))
    torch.manual_seed(1)
    for batch in (1, 5):
        images = torch.randn(batch, 3, 4)
        torch.testing.assert_close(Network(graph)(images), model(images), rtol=0, atol=0)
    assert bool(decomposed) == (write in TORCH_DECOMPOSES)


class Rescaled(nn.Module):
    """Divides its weight in the first call and writes through a view, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.is_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_rescaled:
            with torch.no_grad():
                self.linear.weight.div_(4)
            self.is_rescaled = True
        out = self.linear(x)
        out[:, 0] = 1
        return out


def test_a_parameter_that_the_first_call_changes_is_changed_in_the_network() -> None:
    x = torch.randn(3, 4)
    graph = trace(Rescaled().requires_grad_(False), (x,))
    torch.testing.assert_close(Network(graph)(x), Rescaled()(x), rtol=0, atol=0)
