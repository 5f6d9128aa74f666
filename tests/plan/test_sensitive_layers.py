"""Which layers make outputs, choose, or read a normalization follows from the graph alone."""

from __future__ import annotations

import pytest
import torch
from support.fitting_models import example_graph
from torch import Tensor, nn

from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.plan.fit.fitted_layers import behind_norms, sensitive_layers


def modules(graph: Graph, layers: list[str] | tuple[str, ...]) -> list[str]:
    """Return the paths of the layers' modules."""
    return [graph.by_name[layer].scope for layer in layers]


class Decoder(nn.Module):
    """Attention whose keys are returned for a cache, and hidden states beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.k(x)
        scores = self.q(x) @ keys.transpose(1, 2)
        hidden = x + self.up(scores.softmax(-1) @ self.v(x))
        return self.head(hidden).softmax(-1), keys, hidden


def test_what_is_also_read_inside_is_no_head() -> None:
    graph = trace(Decoder().eval(), (torch.randn(2, 3, 8),))
    layers = sensitive_layers(graph)
    assert modules(graph, layers.heads) == ["head"]
    assert layers.divided == ()
    assert layers.routers == ()


class Best(nn.Module):
    """The boxes of the best scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.boxes, self.scores = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.body(x))
        best, places = self.scores(y).squeeze(-1).topk(2, -1)
        boxes = self.boxes(y)
        return boxes.gather(1, places[..., None].expand(-1, -1, 4)), best


def test_boxes_that_scores_choose_have_a_head_of_their_own() -> None:
    graph = trace(Best().eval(), (torch.randn(2, 5, 4),))
    layers = sensitive_layers(graph)
    assert set(modules(graph, layers.heads)) == {"boxes", "scores"}
    assert layers.divided == layers.heads
    assert modules(graph, layers.routers) == ["scores"]


class Anchors(nn.Module):
    """One head whose channels are cut into centers, sizes and scores; the best are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1)
        self.register_buffer("grid", torch.rand(2, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(torch.relu(self.body(x)))
        centers, sizes, scores = y.split([2, 2, 2], 1)
        boxes = torch.cat([centers.sigmoid() * 2 + self.grid, sizes.exp() * 8], 1)
        best, _ = scores.flatten(1).topk(2, 1)
        return boxes, best


def test_a_head_is_divided_if_its_channels_are_cut() -> None:
    graph = trace(Anchors().eval(), (torch.randn(2, 3, 6, 6),))
    layers = sensitive_layers(graph)
    for names in (layers.heads, layers.divided, layers.routers):
        assert modules(graph, names) == ["head"]


def test_routers_are_found_behind_functions_of_one_value() -> None:
    pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    graph = example_graph("experts")
    assert modules(graph, sensitive_layers(graph).routers) == [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]


class Normalized(nn.Module):
    """An RMSNorm that is written out, with a factor, and a layer that reads a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))
        self.norm = nn.LayerNorm(8)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + self.first((1 + self.factor) * y)
        x = x + self.second(self.norm(x).flatten(0, 1).view_as(x))
        return self.third(x)


def test_norms_are_found_however_they_are_written() -> None:
    graph = trace(Normalized().eval(), (torch.randn(2, 3, 8),))
    assert modules(graph, behind_norms(graph)) == ["first", "second"]
