"""Where activations are quantized, operator by operator: the sharing rules of pytorch_nndct
3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from support.toys import TOYS, traced
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.graph.tracing.trace import trace
from quantizer.plan.floating import multiplies_values
from quantizer.plan.groups import layout
from quantizer.plan.layout import EVERY_JOIN, Multiplication, quantization_point


def halves(y: Tensor, first: Tensor) -> Tensor:
    """The first two channels are those of another tensor."""
    z = torch.zeros_like(y)
    z[:, :2], z[:, 2:] = first[:, 2:], y[:, 2:]
    return z


class Net(nn.Module):
    """Two 1x1 convolutions `a` and `b`, a batch norm, an embedding, an LSTM, a linear layer;
    `body` says what runs.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.embed, self.lstm, self.fc = nn.Embedding(5, 4), nn.LSTM(6, 4), nn.Linear(4, 2)

    def forward(self, *xs: Tensor) -> Any:
        return self.body(self, *xs)


def quantized(body: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """For each place of quantization, without the network's inputs, the layers that share it;
    by short name.
    """
    where = layout(trace(Net(body).eval(), (torch.ones(2, 4, 6, 6),)))
    return {
        short(point): tuple(map(short, group.members))
        for point, group in where.groups.items()
        if not point.startswith("Net::input")
    }


def short(name: str) -> str:
    """`a` for `Net::Net/Conv2d[a]/conv2d`, `relu` for `Net::Net/relu`."""
    scope = name.removeprefix("Net::Net/")
    return scope.partition("[")[2].partition("]")[0] or scope


def twice(use: Callable[[Net, Tensor], Any]) -> Callable[[Net, Tensor], Any]:
    """A body whose convolution `a` is read by `use`, more than once."""
    return lambda net, x: use(net, net.a(x))


Groups = dict[str, tuple[str, ...]]
A, B = {"a": ("a",)}, {"b": ("b",)}
CASES: dict[str, tuple[Callable[[Net, Tensor], Any], Groups]] = {
    "conv": (lambda n, x: n.a(x), A),
    "conv relu": (lambda n, x: F.relu(n.a(x)), {"relu": ("a", "relu")}),
    "conv relu6": (lambda n, x: F.relu6(n.a(x)), {"relu6": ("a", "relu6")}),
    "conv leaky_relu": (lambda n, x: F.leaky_relu(n.a(x)), {"leaky_relu": ("a", "leaky_relu")}),
    "conv clamp": (lambda n, x: n.a(x).clamp(0, 1), {"clamp": ("a", "clamp")}),
    "conv relu relu": (
        lambda n, x: F.relu(F.relu(n.a(x))),
        {"relu.1": ("a", "relu", "relu.1")},
    ),
    "conv norm relu": (lambda n, x: F.relu(n.norm(n.a(x))), A | {"relu": ("norm", "relu")}),
    "conv maxpool relu": (
        lambda n, x: F.relu(F.max_pool2d(n.a(x), 2)),
        {"relu": ("a", "max_pool2d", "relu")},
    ),
    "conv read twice": (twice(lambda n, y: F.relu(y) + y), A | {"add": ("add",)}),
    "conv read twice, relu to conv": (
        twice(lambda n, y: n.b(F.relu(y)) + y),
        A | B | {"add": ("add",)},
    ),
    "conv read twice, relu6": (
        twice(lambda n, y: F.relu6(y) + y),
        A | {"relu6": ("relu6",), "add": ("add",)},
    ),
    "conv returned and read": (twice(lambda n, y: (y, F.relu(y))), A),
    "add relu": (lambda n, x: F.relu(n.a(x) + n.b(x)), A | B | {"relu": ("add", "relu")}),
    "relu of an input": (lambda n, x: n.a(F.relu(x)), A),
    "relu6 of an input": (lambda n, x: n.a(F.relu6(x)), A | {"relu6": ("relu6",)}),
    "concat": (lambda n, x: torch.cat([n.a(x), n.b(x)]), A | B),
    "concat of relu": (
        lambda n, x: torch.cat([F.relu(n.a(x)), n.b(x)]),
        {"relu": ("a", "relu")} | B,
    ),
    "concat of moved": (
        lambda n, x: torch.cat([F.relu(n.a(x)).flatten(1), F.max_pool2d(n.b(x), 1).flatten(1)]),
        {"relu": ("a", "relu")} | B,
    ),
    "concat of an input": (lambda n, x: torch.cat([n.a(x), x]), A),
    "concat, read elsewhere too": (twice(lambda n, y: (torch.cat([y, n.b(y)]), n.b(y))), A | B),
    "concat relu": (lambda n, x: F.relu(torch.cat([n.a(x), n.b(x)])), A | B),
    "concat of concat": (lambda n, x: torch.cat([torch.cat([n.a(x), n.b(x)]), n.b(x)]), A | B),
    "last sigmoid, joined": (lambda n, x: torch.cat([n.a(x).sigmoid(), n.b(x)]), A | B),
    "masked with zeros": (lambda n, x: n.b(n.a(x).masked_fill(x > 0, 0.0)), A | B),
    "chosen of one": (twice(lambda n, y: n.b(torch.where(y > 0, y, y.flip(1)))), A | B),
    "moves": (
        lambda n, x: n.b(
            F.max_pool2d(n.a(x).permute(0, 1, 3, 2).flatten(2).reshape(2, 4, 6, 6), 1)
        ),
        A | B,
    ),
    "transposed": (lambda n, x: n.b(n.a(x).mT), A | B),
    "padding with zeros": (lambda n, x: n.b(F.pad(n.a(x), (1, 1))), A | B),
    "padding with ones": (
        lambda n, x: n.b(F.pad(n.a(x), (1, 1), value=1.0)),
        A | B | {"pad": ("pad",)},
    ),
    "chunks": (twice(lambda n, y: n.b(torch.cat(y.chunk(2, 1)[::-1], 1))), A | B),
    "assigned in parts": (
        lambda n, x: n.b(halves(n.a(x), n.a(x + 1))),
        A | B | {"add": ("add",)},
    ),
    "assigned whole": (lambda n, x: n.b(torch.empty_like(x).copy_(n.a(x))), A | B),
    "a constant assigned": (
        lambda n, x: n.b(n.a(x).select_scatter(torch.ones_like(x)[:, 0], 1, 0)),
        A | B,
    ),
    "tiled": (lambda n, x: n.b(n.a(x).tile(1, 1, 2, 2)), A | B),
    "a grid": (
        lambda n, x: n.b(
            n.a(x)
            + torch.stack(
                torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
            ).sum(0)
        ),
        A | B | {"add": ("add",)},
    ),
    "average": (
        lambda n, x: F.adaptive_avg_pool2d(n.a(x), 1),
        A | {"adaptive_avg_pool2d": ("adaptive_avg_pool2d",)},
    ),
    "last sigmoid": (lambda n, x: torch.sigmoid(n.a(x)), A),
    "last softmax, reshaped": (lambda n, x: n.a(x).softmax(1).flatten(1), A),
    "sigmoid between": (
        lambda n, x: n.b(torch.sigmoid(n.a(x))),
        A | B | {"sigmoid": ("sigmoid",)},
    ),
    "sigmoid returned and read": (
        lambda n, x: (lambda y: (y, n.b(y)))(torch.sigmoid(n.a(x))),
        A | B | {"sigmoid": ("sigmoid",)},
    ),
    "unknown before conv": (
        lambda n, x: n.b(n.a(x).cumsum(1)),
        A | B | {"cumsum": ("cumsum",)},
    ),
    "unknown, moved, before conv": (
        lambda n, x: n.b(n.a(x).cumsum(1).permute(0, 1, 3, 2)),
        A | B | {"cumsum": ("cumsum",)},
    ),
    "unknown before add": (lambda n, x: n.a(x).cumsum(1) + x, A | {"add": ("add",)}),
    "unknown at the end": (lambda n, x: n.a(x).cumsum(1), A),
    "lstm before linear": (
        lambda n, x: n.fc(n.lstm(x[:, :, :, 0])[0][:, :, :4]),
        # The layer and what is taken out of its results
        {"lstm": ("lstm", "lstm"), "fc": ("fc",)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_what_is_quantized_together(
    body: Callable[[Net, Tensor], Any], expected: Groups
) -> None:
    assert quantized(body) == expected


def joins(body: Callable[..., Any], single: Container[str] = ()) -> dict[str, tuple[str, ...]]:
    """For each join the layers that multiply several of its parts at once, by short name."""
    where = layout(trace(Net(body).eval(), (torch.ones(2, 4, 6, 6),)), single)
    return {
        short(name): tuple(short(product.layer) for product in join.products)
        for name, join in where.joins.items()
    }


JOINS: dict[str, tuple[Callable[[Net, Tensor], Any], dict[str, tuple[str, ...]]]] = {
    "returned": (lambda n, x: torch.cat([n.a(x), n.b(x)]), {"cat": ()}),
    "summed": (lambda n, x: torch.cat([n.a(x), n.b(x)]).sum(0), {"cat": ()}),
    "convolved": (lambda n, x: n.b(torch.cat([n.a(x), x])), {"cat": ("b",)}),
    "moved, convolved": (lambda n, x: n.b(torch.cat([n.a(x), x]).flip(0).mT), {"cat": ("b",)}),
    "rectified, convolved": (lambda n, x: n.b(torch.cat([n.a(x), x]).relu()), {"cat": ("b",)}),
    "cut off, convolved": (lambda n, x: n.b(F.relu6(torch.cat([n.a(x), x]))), {"cat": ("b",)}),
    "one part convolved": (lambda n, x: n.b(torch.cat([n.a(x), x], 1)[:, 4:]), {"cat": ()}),
    "parts of both convolved": (
        lambda n, x: n.b(torch.cat([n.a(x), x], 1)[:, 2:6]),
        {"cat": ("b",)},
    ),
    "joined again": (
        lambda n, x: n.b(torch.cat([torch.cat([n.a(x), x]), x])),
        {"cat.1": ("b",)},
    ),
    "stacked": (lambda n, x: torch.stack([n.a(x), x]) @ x.mT, {"stack": ("matmul",)}),
    "chosen": (lambda n, x: n.b(torch.where(x > 0, n.a(x), x)), {"where": ("b",)}),
    "filled": (lambda n, x: n.b(n.a(x).masked_fill(x > 0, 3.0)), {"masked_fill": ("b",)}),
    "filled with zeros": (
        lambda n, x: n.b(n.a(x).masked_fill(x > 0, 0.0)),
        {"masked_fill": ()},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "expected"), JOINS.values(), ids=JOINS)
def test_who_needs_one_grid_for_all_parts_of_a_join(
    body: Callable[[Net, Tensor], Any], expected: dict[str, tuple[str, ...]]
) -> None:
    assert joins(body) == expected


def test_a_device_with_one_grid_in_a_tensor_quantizes_at_the_join() -> None:
    graph = trace(
        Net(lambda n, x: torch.cat([torch.cat([n.a(x), n.b(x)]).relu(), n.b(x)])).eval(),
        EXAMPLE,
    )
    where = layout(graph, EVERY_JOIN)
    assert [short(point) for point in where.groups] == ["Net::input_0", "cat.1"]
    assert {short(name) for name in where.served} == {"a", "b"}


EXAMPLE = (torch.ones(2, 4, 6, 6),)


def test_inputs_are_quantized_unless_they_are_integers() -> None:
    example = (
        torch.ones(2, 4, 6, 6),
        torch.ones(2, 4, 6, 6),
        torch.ones(2, 3, dtype=torch.long),
    )
    where = layout(
        trace(Net(lambda n, x, y, t: (n.a(x), torch.cat([y, y]), n.embed(t))).eval(), example)
    )
    assert [name for name in where.groups if "input" in name] == [
        "Net::input_0",
        "Net::input_1",
    ]


@pytest.mark.parametrize("name", TOYS)
def test_every_layer_is_quantized_once_at_most_and_members_find_theirs(name: str) -> None:
    graph = traced(name)
    where = layout(graph)
    assert not set(where.groups) & {*where.served, *where.unneeded}
    for point, group in where.groups.items():
        assert point in group.members
        assert graph.by_name[point].is_float
        one_result = [
            member for member in group.members if graph.by_name[member].dtype is not None
        ]
        assert {quantization_point(graph, where, member) for member in one_result} == {point}


@pytest.mark.parametrize("name", TOYS)
def test_what_layers_that_multiply_read_is_quantized(name: str) -> None:
    graph = traced(name)
    where = layout(graph)
    products = [product for join in where.joins.values() for product in join.products]
    for node in graph.nodes:
        if node.row.kind == "mac":
            for read in node.refs():
                source = graph.by_name[read]
                if (
                    source.is_float
                    and source.op != "parameter"
                    and multiplies_values(node, read)
                ):
                    is_decided_later = Multiplication(node.name, read) in products
                    assert is_decided_later or quantization_point(graph, where, read), (
                        f"{read} of {node.name}"
                    )
