"""What stays float whatever the config says: masks, what follows from constants, what only
float operators read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.runs import ROOT
from support.toys import traced
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer.graph.tracing.trace import trace
from quantizer.plan.floating import (
    ARGUMENT,
    BOUNDED,
    COMPARED_TO_COUNT,
    DENOMINATOR,
    DERIVED,
    FLOAT_READERS,
    MASK,
    UNREAD,
)
from quantizer.plan.groups import layout


class Net(nn.Module):
    """Two linear layers `a` and `b`, a trained `factor`, constants; `body` says what runs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.a, self.b = body, nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.ones(()))
        self.register_buffer("far", torch.tensor([[0.0, -100.0], [0.0, 0.0]]))
        self.register_buffer("near", torch.tensor([0.5, 1.0, 0.5, 1.0]))

    def forward(self, x: Tensor, ids: Tensor, given: Tensor) -> Any:
        return self.body(self, x, ids, given)


def floats(body: Callable[..., Any]) -> dict[str, str]:
    """Reasons by layer, under the last part of the name, without those of constants and
    integers themselves.
    """
    example = (torch.ones(2, 2, 4), torch.ones(2, 2, dtype=torch.long), torch.zeros(2, 2, 2))
    graph = trace(Net(body).eval(), example)
    where = layout(graph)
    found = {name: why for name, why in where.floats.items() if name not in where.groups}
    computed = (
        node
        for node in graph.nodes
        if node.is_float and (node.row.kind != "structural" or node.op == "input")
    )
    return {
        node.name.rpartition("/")[2]: found[node.name]
        for node in computed
        if node.name in found
    }


def scores(net: Net, x: Tensor) -> Tensor:
    return net.a(x) @ net.b(x).transpose(1, 2)


def with_a_row_of(value: float, scores: Tensor) -> Tensor:
    """Scores that may not be attended to, by assignment."""
    scores = scores.clone()
    scores[:, 0] = value
    return scores


def both(net: Net, x: Tensor) -> Tensor:
    return x.sin() + net.b(x)


def returned(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles, angles.sin()


def with_its_sine(x: Tensor) -> Tensor:
    return (x + x.sin()).relu()


def sparsemax(x: Tensor) -> Tensor:
    """Martins and Astudillo, 2016: how many of the largest stay above zero is the index of
    their sum.
    """
    largest, _ = x.sort(dim=-1, descending=True)
    sums = largest.cumsum(-1) - 1
    count = (torch.arange(1.0, x.shape[-1] + 1) * largest > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, count - 1) / count).relu()


GIVEN = {"Net::input_2": UNREAD}
SPARSEMAX = {"sub": COMPARED_TO_COUNT, "mul": COMPARED_TO_COUNT}
CASES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "nothing": (lambda n, x, i, g: n.a(x) + 1, GIVEN),
    "a buffer of -100": (lambda n, x, i, g: (scores(n, x) + n.far).softmax(-1), GIVEN | {"add": MASK}),
    "a literal -inf": (
        lambda n, x, i, g: (scores(n, x) + torch.full((2, 2), float("-inf")).triu(1)).softmax(-1),
        GIVEN | {"triu": DERIVED, "add": MASK},
    ),
    "filled in": (lambda n, x, i, g: scores(n, x).masked_fill(i > 1, -1e9).softmax(-1), GIVEN | {"masked_fill": MASK}),
    "filled with zeros": (lambda n, x, i, g: scores(n, x).masked_fill(i > 1, 0.0).softmax(-1), GIVEN),
    "assigned": (
        lambda n, x, i, g: with_a_row_of(-1e9, scores(n, x)).softmax(-1),
        GIVEN | {"expand": DERIVED, "select_scatter": MASK},
    ),
    "assigned zeros": (
        lambda n, x, i, g: with_a_row_of(0.0, scores(n, x)).softmax(-1),
        GIVEN | {"expand": DERIVED},
    ),
    "chosen": (
        lambda n, x, i, g: torch.where(i > 1, scores(n, x), torch.finfo(x.dtype).min).softmax(-1),
        GIVEN | {"where": MASK},
    ),
    "from integers": (
        lambda n, x, i, g: (scores(n, x) + (1.0 - i[:, None].float()) * -1e4).softmax(-1),
        GIVEN | {"to": DERIVED, "rsub": DERIVED, "mul": DERIVED, "add": MASK},
    ),
    "given by the caller": (lambda n, x, i, g: (scores(n, x) + g).softmax(-1), {"Net::input_2": MASK, "add": MASK}),
    "given to the attention": (
        lambda n, x, i, g: F.scaled_dot_product_attention(n.a(x), n.b(x), x, attn_mask=g),
        {"Net::input_2": MASK},
    ),
    "a mask that is multiplied": (lambda n, x, i, g: n.a(x) * n.near, GIVEN),
    "positions": (
        lambda n, x, i, g: n.a(x) + torch.arange(4).float().mul(0.3).sin(),
        GIVEN | {"to": DERIVED, "mul": DERIVED, "sin": DERIVED},
    ),
    "positions into a layer": (lambda n, x, i, g: n.a(x) + n.b(torch.arange(4).float() * 0.3), GIVEN | {"to": DERIVED}),
    "a norm": (
        lambda n, x, i, g: n.a(x) * torch.rsqrt(n.a(x).pow(2).mean(-1, keepdim=True) + 1e-5),
        GIVEN | {"mean": DENOMINATOR, "add": DENOMINATOR},
    ),
    "a norm kept from zero": (
        lambda n, x, i, g: n.a(x) / n.a(x).norm(dim=-1, keepdim=True).clamp_min(1e-12),
        GIVEN | {"clamp_min": BOUNDED},
    ),
    "a guarded sum": (
        lambda n, x, i, g: n.a(x) / ((n.a(x) * n.b(x)).relu().sum(-1, keepdim=True) + 1e-15),
        GIVEN | {"mul": DENOMINATOR, "relu": DENOMINATOR, "sum": DENOMINATOR, "add": DENOMINATOR},
    ),
    "a layer that divides": (
        lambda n, x, i, g: x / (n.a(x) + 3.0),
        GIVEN | {"linear": DENOMINATOR, "add": DENOMINATOR},
    ),
    "a root": (
        lambda n, x, i, g: n.a(x) * (n.a(x).abs() + 1.0).sqrt(),
        GIVEN | {"abs": FLOAT_READERS, "add": FLOAT_READERS},
    ),
    "a sum of two": (
        lambda n, x, i, g: x / (n.a(x).abs() + n.b(x).abs()),
        GIVEN | dict.fromkeys(("linear", "abs", "abs.1", "add"), DENOMINATOR),
    ),
    "what both divides and is multiplied": (
        lambda n, x, i, g: n.b(n.a(x)) / n.a(x)[..., :1],
        GIVEN | {"slice": DENOMINATOR, "linear.1": DENOMINATOR},
    ),
    "what is compared to count an index": (lambda n, x, i, g: n.b(sparsemax(n.a(x))), GIVEN | SPARSEMAX),
    "what is compared to choose a value": (lambda n, x, i, g: torch.where(n.a(x) > 0, n.a(x), n.b(x)), GIVEN),
    "division by a number": (lambda n, x, i, g: n.a(x) / 3.0, GIVEN),
    "a layer before a sine": (lambda n, x, i, g: n.a(x).sin(), GIVEN | {"linear": ARGUMENT}),
    "a product with constants before a cosine": (
        lambda n, x, i, g: n.b((torch.cat([x, x.neg()], -1) @ n.far.repeat(4, 2)).cos()),
        GIVEN | dict.fromkeys(("Net::input_0", "neg", "cat", "matmul"), ARGUMENT) | {"repeat": DERIVED},
    ),
    "a product of two values before a cosine": (
        lambda n, x, i, g: (n.a(x) @ n.b(x).mT).cos(),
        GIVEN | {"matmul": ARGUMENT},
    ),
    "an angle that is also returned": (lambda n, x, i, g: (n.a(x).sin(), n.a(x)), GIVEN | {"linear": ARGUMENT}),
    "a layer that a sine and another layer read": (
        lambda n, x, i, g: both(n, n.a(x)),
        GIVEN | {"linear": ARGUMENT},
    ),
    "a layer that a sine reads, and that is returned": (lambda n, x, i, g: returned(n.a(x)), GIVEN),
    "a sum that a sine and another layer read": (
        lambda n, x, i, g: both(n, n.a(x) + 1),
        GIVEN | {"linear": ARGUMENT, "add": ARGUMENT},
    ),
    "a sum that a sine and a sum read": (
        lambda n, x, i, g: with_its_sine(n.a(x) * 2),
        GIVEN | {"linear": ARGUMENT, "mul": ARGUMENT},
    ),
    "an input and its sine, joined": (
        lambda n, x, i, g: n.b(torch.cat([x[..., :2], (x[..., 2:] * 9).sin()], -1)),
        GIVEN | {"Net::input_0": ARGUMENT, "slice.1": ARGUMENT, "mul": ARGUMENT},
    ),
    "a trained frequency": (
        lambda n, x, i, g: (n.factor * x).sin(),
        GIVEN | {"Net::input_0": ARGUMENT, "mul": ARGUMENT},
    ),
    "an index": (
        lambda n, x, i, g: n.near[(n.a(x).sigmoid() * 3).long()],
        GIVEN | dict.fromkeys(("linear", "sigmoid", "mul"), ARGUMENT),
    ),
    "a remainder": (lambda n, x, i, g: n.b((n.a(x) + 1) % 1.0), GIVEN | {"linear": ARGUMENT, "add": ARGUMENT}),
    "a quotient without a remainder": (
        lambda n, x, i, g: n.b(torch.div(n.a(x), 0.1, rounding_mode="floor")),
        GIVEN | {"linear": ARGUMENT},
    ),
    "what is rounded": (
        lambda n, x, i, g: n.b((n.a(x).tanh() * 4).round() / 4),
        GIVEN | dict.fromkeys(("linear", "tanh", "mul"), ARGUMENT),
    ),
    "what is compared with buckets": (
        lambda n, x, i, g: n.near[torch.bucketize(n.a(x), n.near)],
        GIVEN | {"linear": ARGUMENT},
    ),
    "a complex exponential": (lambda n, x, i, g: torch.exp(1j * n.a(x)).real, GIVEN | {"linear": ARGUMENT}),
    "where an image is read": (
        lambda n, x, i, g: F.grid_sample(n.a(x)[:, None], n.b(x)[:, None, :, :2].tanh()),
        GIVEN | dict.fromkeys(("linear", "slice.1", "unsqueeze.1", "slice.2", "tanh"), ARGUMENT),
    ),
    "truth values": (lambda n, x, i, g: torch.where(n.a(x).bool(), x, 0.0), GIVEN),
    "a layer before an exponential": (lambda n, x, i, g: n.a(x).exp(), GIVEN),
    "a scaled exponential": (lambda n, x, i, g: n.a(x) * n.factor.exp(), GIVEN),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_what_stays_float(body: Callable[..., Any], expected: dict[str, str]) -> None:
    assert floats(body) == expected


def test_a_sparsemax_of_rounded_values_finds_an_index() -> None:
    torch.manual_seed(0)
    network = Net(lambda n, x, i, g: n.b(sparsemax(n.a(x))))
    nn.init.normal_(network.a.weight, std=1000)
    batch = (torch.randn(64, 1, 4), torch.ones(64, 2, dtype=torch.long), torch.zeros(64, 2, 2))
    assert (
        quantizer.calibrate(network, ROOT / "configs" / "cpu_int8.json", [batch])
        .test()
        .metrics["sqnr_db"]
        > 0
    )


def test_an_input_that_feeds_more_than_a_softmax_is_quantized() -> None:
    assert "Net::input_2" not in floats(
        lambda n, x, i, g: ((scores(n, x) + g).softmax(-1), g * 2)
    )


def test_no_mask_of_the_toy_is_quantized() -> None:
    where = layout(traced("masked"))
    quantized = {name.rpartition("/")[2].partition(".")[0] for name in where.groups}
    assert quantized.isdisjoint(("masked_fill", "where", "triu", "amax"))
    assert sum(why == MASK for why in where.floats.values()) == 6
