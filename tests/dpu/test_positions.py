"""Aligned positions are inside the DPU's limits, whatever calibration found; each move is
told.
"""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dpu_networks import NETWORKS, Applied, Joined
from torch import nn
from torch.nn import functional as F

from quantizer.algorithms.dpu_alignment.dpu_alignment import align
from quantizer.graph.ir import Graph, Node
from quantizer.graph.tracing.trace import trace
from quantizer.plan.model import Key


def graph_of(module: nn.Module) -> Graph:
    return trace(module.eval(), (torch.zeros(2, 4, 6, 6),))


def named(graph: Graph, end: str) -> str:
    return next(node.name for node in graph.nodes if node.name.endswith(end))


def conv(weights: int, bias: int, made: int, read: int = 6) -> tuple[Graph, dict[Key, int]]:
    graph = graph_of(nn.Conv2d(4, 8, 3))
    name = named(graph, "conv2d")
    return graph, {
        (graph.nodes[0].name, "input"): read,
        (name, "weights"): weights,
        (name, "bias"): bias,
        (name, "activation"): made,
    }


# (weights, bias, output) at input position 6, before and after: the limits of pytorch_nndct
# 3.5, shift_cut in [0, 16] and shift_bias in [min(0, shift_cut - 16), 16].
SHIFTS = {
    "inside": ((7, 9, 5), (7, 9, 5)),
    "the output is finer than the products": ((2, 6, 11), (2, 6, 8)),
    "the output is too coarse": ((12, 10, 0), (10, 10, 0)),
    "the bias is too fine": ((4, 12, 10), (4, 12, 10)),
    "the bias is far too fine": ((4, 30, 2), (4, 18, 2)),
    "the bias is too coarse": ((12, 0, 4), (10, 0, 4)),
}


@pytest.mark.parametrize("case", SHIFTS)
def test_shifts_of_a_convolution(case: str) -> None:
    before, after = SHIFTS[case]
    graph, positions = conv(*before)
    found, moves = align(graph, positions)
    name = named(graph, "conv2d")
    assert tuple(found[name, role] for role in ("weights", "bias", "activation")) == after
    assert {(move.layer, move.role) for move in moves} == {
        key for key in found if found[key] != positions[key]
    }


def test_a_move_says_which_limit_and_where() -> None:
    _, moves = align(*conv(2, 6, 11))
    assert [str(move) for move in moves] == [
        "activation of Conv2d::Conv2d/conv2d: position 11 -> 8: "
        "shift_cut of Conv2d::Conv2d/conv2d would be -3, and the DPU has 0 to 16"
    ]


def every_position(graph: Graph, at: int) -> dict[Key, int]:
    roles = {"input": ("input",), "conv2d": ("weights", "bias", "activation")}
    return {
        (node.name, role): at
        for node in graph.nodes
        for role in roles.get(node.op, ("activation",))
    }


@pytest.mark.parametrize("asked", [False, True])
def test_inputs_of_a_concat_take_its_position_if_asked(asked: bool) -> None:
    graph = graph_of(Joined())
    positions = every_position(graph, 6)
    cat, a = (
        (named(graph, "cat"), "activation"),
        (named(graph, "Conv2d[a]/conv2d"), "activation"),
    )
    positions[cat] = 3
    found, moves = align(graph, positions, change_concat_input_fix=asked)
    assert found[a] == (3 if asked else 6)
    assert any("change_concat_input_fix" in move.why for move in moves) == asked


@pytest.mark.parametrize("asked", [False, True])
def test_what_average_pooling_reads_takes_its_position_if_asked(asked: bool) -> None:
    graph = graph_of(Applied(lambda y, x: F.avg_pool2d(y, 3)))
    positions = every_position(graph, 6)
    positions[named(graph, "avg_pool2d"), "activation"] = 7
    found, _ = align(graph, positions, change_pool_input_fix=asked)
    assert found[named(graph, "conv2d"), "activation"] == (7 if asked else 6)


def test_padding_with_another_value_keeps_the_position_of_its_input() -> None:
    graph = graph_of(Applied(lambda y, x: F.pad(y, (1, 1), value=2.0)))
    positions = every_position(graph, 6)
    positions[named(graph, "pad"), "activation"] = 5
    found, _ = align(graph, positions)
    assert found[named(graph, "pad"), "activation"] == 6


def test_hard_activations_have_least_and_most_positions() -> None:
    graph = graph_of(Applied(lambda y, x: F.hardsigmoid(F.hardswish(y)) * y))
    positions = every_position(graph, 9)
    conv2d, swish, sigmoid = (
        (named(graph, end), "activation") for end in ("conv2d", "hardswish", "hardsigmoid")
    )
    positions |= {conv2d: -1, sigmoid: 5}
    found, _ = align(graph, positions)
    assert (found[conv2d], found[swish], found[sigmoid]) == (0, 7, 7)


@functools.cache
def toy(name: str) -> Graph:
    torch.manual_seed(0)
    return graph_of(NETWORKS[name]())


def shifts(graph: Graph, node: Node, at: dict[Key, int]) -> tuple[int, int]:
    """shift_cut and shift_bias of a convolution that is quantized at its own output."""
    source = graph.by_name[next(node.refs())]
    product = (
        at[node.name, "weights"]
        + at[source.name, "input" if source.op == "input" else "activation"]
    )
    return product - at[node.name, "activation"], product - at[node.name, "bias"]


@pytest.mark.parametrize("name", ["conv2d", "concat", "hardswish", "average"])
@settings(max_examples=40, derandomize=True, deadline=None)
@given(draw=st.data(), tied=st.booleans())
def test_aligned_positions_are_inside_the_limits(
    name: str, draw: st.DataObject, tied: bool
) -> None:
    graph = toy(name)
    positions = {key: draw.draw(st.integers(-8, 24)) for key in every_position(graph, 0)}
    wanted = {"change_concat_input_fix": tied, "change_pool_input_fix": tied}
    found, moves = align(graph, positions, **wanted)
    assert set(found) == set(positions)
    for node in graph.nodes:
        if node.op == "conv2d" and graph.by_name[next(node.refs())].op in ("input", "cat"):
            readers = [
                graph.by_name[reader].op for reader in graph.consumers[node.name] if reader
            ]
            if readers != ["cat"]:
                cut, bias = shifts(graph, node, found)
                assert 0 <= cut <= 16
                assert min(0, cut - 16) <= bias <= 16
    assert align(graph, found, **wanted) == (found, ())
    replayed = dict(positions)
    for move in moves:
        assert replayed[move.layer, move.role] == move.before
        replayed[move.layer, move.role] = move.after
    assert replayed == found


def test_a_circle_of_ties_ends() -> None:
    """The output of `a` and what it reads share one position, and the weights are coarser than
    the limit allows.
    """

    class Circle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            z = self.a(y)
            return torch.cat([y, z], 1) + torch.cat([z, y], 1)

    graph = graph_of(Circle())
    positions = every_position(graph, 5)
    positions[named(graph, "Conv2d[a]/conv2d"), "weights"] = -2
    wanted = {"change_concat_input_fix": True}
    found, _ = align(graph, positions, **wanted)
    assert found[named(graph, "Conv2d[a]/conv2d"), "weights"] == 0
    assert align(graph, found, **wanted) == (found, ())
