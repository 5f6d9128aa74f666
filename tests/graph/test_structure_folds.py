"""Where factors fold in small networks whose structure is plain to see, and where they do
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.structures import PIXELS, Mixture, Mobile, changed_by_folding, modules_of, prepared
from torch import Tensor, nn

from quantizer.algorithms.equalization.equalization import find_pairs
from quantizer.graph.ir import Graph
from quantizer.graph.structure.definitions import InputGroup
from quantizer.graph.structure.find import find_structure

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """`first` makes what `last` reads, by way of `between`."""

    def __init__(
        self, between: Callable[..., Tensor], first: nn.Module | None = None, reads: int = 8
    ) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = first or nn.Linear(8, 8), nn.Linear(reads, 4)
        self.gain = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x), x))


def last_group(net: nn.Module, *inputs: Any) -> InputGroup:
    return last_of(prepared(net, *inputs), inputs)


def last_of(graph: Graph, inputs: tuple[Any, ...] = (X,)) -> InputGroup:
    structure = find_structure(graph)
    assert changed_by_folding(graph, inputs, structure) < 1e-5
    return structure.groups[-1]


PASSES: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "nothing": lambda net, y, x: y,
    "relu": lambda net, y, x: torch.relu(y),
    "leaky_relu": lambda net, y, x: nn.functional.leaky_relu(y, 0.1),
    "two_signs": lambda net, y, x: -y.abs(),
    "gate_from_elsewhere": lambda net, y, x: y * torch.sigmoid(x),
    "division": lambda net, y, x: y / (1 + x.square()),
    "mean_over_tokens": lambda net, y, x: y.mean(1),
    "one_token": lambda net, y, x: y[:, 0],
    "chosen_tokens": lambda net, y, x: y[:, torch.tensor([3, 1])],
    "heads_and_back": lambda net, y, x: (
        y.view(3, 5, 2, 4).transpose(1, 2).transpose(1, 2).reshape(3, 5, 8)
    ),
    "weights_by_token": lambda net, y, x: torch.softmax(x @ x.mT, -1) @ y,
    "einsum": lambda net, y, x: torch.einsum("bqk,bkd->bqd", torch.softmax(x @ x.mT, -1), y),
    "transposed_product": lambda net, y, x: (y.mT @ torch.softmax(x @ x.mT, -1)).mT,
    "attention": lambda net, y, x: nn.functional.scaled_dot_product_attention(x, x, y),
    "halves_swapped": lambda net, y, x: torch.cat([*reversed(y.chunk(2, -1))], -1),
    "constant": lambda net, y, x: 0.5 * y,
    "a_wider_type": lambda net, y, x: y.to(torch.float64).type_as(x),
    "a_sum_with_itself": lambda net, y, x: torch.relu(y) - y.roll(1, 1),
    "the_larger_of_two": lambda net, y, x: torch.maximum(y, y[:, :1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_a_factor_passes_through(name: str) -> None:
    graph = prepared(Net(PASSES[name]), X)
    fold = last_of(graph).fold
    assert fold is not None and fold.kind == "layer" and "first" in fold.node
    assert [(pair.first.scope, pair.second.scope) for pair in find_pairs(graph)] == [
        ("first", "last")
    ]


STOPS: dict[str, tuple[Callable[[Net, Tensor, Tensor], Tensor], str]] = {
    "gelu": (lambda net, y, x: nn.functional.gelu(y), "no factor passes through Net::Net/gelu"),
    "sum": (lambda net, y, x: y + x, "no factor passes through Net::Net/add"),
    "its_own_gate": (
        lambda net, y, x: y * torch.sigmoid(y),
        "is also read by Net::Net/sigmoid",
    ),
    "a_sum_of_others": (
        lambda net, y, x: y + y.roll(1, -1),
        "no factor passes through Net::Net/add",
    ),
    "its_keys": (
        lambda net, y, x: nn.functional.scaled_dot_product_attention(x, y, y),
        "no factor passes through Net::Net/scaled_dot_product_attention",
    ),
    "its_square": (lambda net, y, x: y * y, "no factor passes through Net::Net/mul"),
    "softmax_of_it": (lambda net, y, x: torch.softmax(y, -1) @ y.mT @ y, "is also read by"),
    "tokens_as_channels": (
        lambda net, y, x: y[:, :4].mT.reshape(3, 4, 8),
        "not each of its channels is one of",
    ),
    "clamped": (lambda net, y, x: y.clamp(-1, 1), "no factor passes through"),
    "ceiling": (lambda net, y, x: y.relu().clamp_max(1), "no factor passes through"),
    "rounded_division": (
        lambda net, y, x: torch.div(y, 2, rounding_mode="floor"),
        "no factor passes through",
    ),
    "padded_with_ones": (
        lambda net, y, x: nn.functional.pad(y[..., 1:], (0, 1), value=1.0),
        "no factor passes through",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_what_no_factor_passes_is_named(name: str) -> None:
    between, why = STOPS[name]
    graph = prepared(Net(between), X)
    group = last_of(graph)
    assert group.fold is None
    assert why in group.why_not
    assert not find_pairs(graph)


def test_a_value_that_the_network_returns_is_left_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y, self.last(y)

    assert "is also read by the output of the network" in last_group(Two(), X).why_not


def test_the_input_of_the_network_has_no_layer_before() -> None:
    assert (
        find_structure(prepared(nn.Linear(8, 4), X)).groups[0].why_not
        == "it is an input of the network"
    )


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(8), (3, 8)),
        (nn.RMSNorm(8), (3, 8)),
        (nn.GroupNorm(2, 8), (3, 8, 4)),
        (nn.BatchNorm1d(8), (3, 8)),
    ],
    ids=["layer_norm", "rms_norm", "group_norm", "batch_norm"],
)
def test_a_norm_takes_factors_unless_it_has_no_weight(
    norm: nn.Module, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    last = nn.Conv1d(8, 4, 1) if len(shape) == 3 else nn.Linear(8, 4)
    group = last_group(nn.Sequential(nn.Sigmoid(), norm, last), x)
    assert group.fold is not None and group.fold.kind == "norm" and group.fold.channels is None
    bare = last_group(nn.Sequential(nn.LayerNorm(shape[1:], elementwise_affine=False), last), x)
    assert bare.fold is None


def test_a_product_with_a_trained_tensor_is_a_place_for_factors() -> None:
    scaled = last_group(Net(lambda net, y, x: torch.tanh(y) * net.gain), X)
    assert (
        scaled.fold is not None
        and scaled.fold.node.endswith("/gain")
        and scaled.fold.offset == 0
    )
    shifted = last_group(Net(lambda net, y, x: torch.tanh(y) * (1.0 + net.gain)), X)
    assert (
        shifted.fold is not None
        and shifted.fold.node.endswith("/gain")
        and shifted.fold.offset == 1
    )
    twice = last_group(Net(lambda net, y, x: torch.tanh(y * net.gain) * net.gain), X)
    assert twice.fold is None and "is also read by" in twice.why_not


def test_layers_that_share_parameters_take_no_factors() -> None:
    twice = Net(lambda net, y, x: torch.relu(net.first(y)))
    assert "shares its parameters with" in last_group(twice, X).why_not
    tied = Net(lambda net, y, x: torch.relu(y), nn.Linear(8, 4), reads=4)
    both = nn.Sequential(tied, nn.Sigmoid(), tied.last)
    group = next(g for g in find_structure(prepared(both, X)).groups if "last" in g.layers[0])
    assert group.fold is None and len(group.tied) == 1


def test_readers_elsewhere_are_changed_as_well() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one, self.other = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.one(y).mean(1) + self.other(y[:, 0])

    graph = prepared(Views(), X)
    structure = find_structure(graph)
    assert [g.fold and modules_of(graph, g.fold.extra) for g in structure.groups] == [
        ["other"],
        ["one"],
    ]
    assert changed_by_folding(graph, (X,), structure) < 1e-5


def test_convolutions_of_all_kinds() -> None:
    torch.manual_seed(0)
    graph = prepared(Mobile(), PIXELS)
    structure = find_structure(graph)
    assert changed_by_folding(graph, (PIXELS,), structure) < 1e-5
    assert changed_by_folding(graph, (PIXELS,), structure, divide=False) > 0.01
    nodes = [group.fold and graph.by_name[group.fold.node].scope for group in structure.groups]
    assert nodes == [None, "stem", "depth", "point", "grouped", "norm"]
    shuffled = structure.groups[4]
    assert shuffled.fold is not None and shuffled.fold.channels == (0, 4, 1, 5, 2, 6, 3, 7)
    assert [group.axis for group in structure.groups] == [-3, -3, -3, -3, -3, -1]
    assert [group.channels for group in structure.groups] == [3, 8, 8, 12, 8, 6]
    assert structure.blocks == ()


def test_experts_share_the_value_of_their_norm_and_fold_each_into_its_own() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    graph = prepared(Mixture(), x)
    structure = find_structure(graph)
    assert [block.path for block in structure.blocks] == ["layers.0", "layers.1"]
    first = [group for group in structure.groups if group.block == 0]
    assert modules_of(graph, first[0].layers) == ["router", *["w1", "w3"] * 3]
    assert [graph.by_name[g.fold.node].scope for g in first[1:] if g.fold] == [
        f"layers.0.moe.experts.{expert}.w3" for expert in range(3)
    ]
    assert changed_by_folding(graph, (x,), structure) < 1e-5
