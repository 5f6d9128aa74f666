"""The graph of a module tree names layers as a trace does, and tells what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api.specs import tiny_lm, tokens
from support.toys import TOYS, built, traced
from torch import nn

from quantizer.errors import ModelError
from quantizer.graph.modules import module_graph, uncovered_modules
from quantizer.graph.tracing.trace import trace
from quantizer.plan.match import has_own_weights


@pytest.mark.parametrize("name", TOYS)
def test_layers_are_called_what_a_trace_calls_them(name: str) -> None:
    for node in module_graph(built(name).module).nodes:
        if node.params and node.inputs:
            twin = traced(name).by_name[node.name]
            assert (node.op, node.scope, node.classes) == (twin.op, twin.scope, twin.classes)
            assert dict(node.params) == dict(twin.params)


def test_the_layers_of_a_language_model_are_those_of_its_trace() -> None:
    model = tiny_lm()
    expected = [node for node in trace(model, (tokens(),)).nodes if has_own_weights(node)]
    found = [node for node in module_graph(model).nodes if node.params]
    assert {node.name for node in found} == {node.name for node in expected}
    assert {node.name: dict(node.params) for node in found} == {
        node.name: dict(node.params) for node in expected
    }


def test_attention_has_its_projections() -> None:
    layers = {
        node.scope: dict(node.params)
        for node in module_graph(nn.MultiheadAttention(8, 2)).nodes
        if node.params
    }
    assert layers == {
        "": {"weight": "in_proj_weight", "bias": "in_proj_bias"},
        "out_proj": {"weight": "out_proj.weight", "bias": "out_proj.bias"},
    }
    apart = module_graph(nn.MultiheadAttention(8, 2, kdim=4)).nodes[0]
    assert list(apart.params.values()) == [
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_bias",
    ]


class Odd(nn.Module):
    """Layers without rules: a bilinear one, a trained matrix, a weight that is computed, one in
    integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(2, 2, 2)
        self.shift = nn.Parameter(torch.zeros(2, 2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.norm = nn.LayerNorm(2)
        self.codes = nn.Linear(2, 2, bias=False)
        self.codes.weight = nn.Parameter(
            torch.zeros(2, 2, dtype=torch.int8), requires_grad=False
        )


def test_what_has_no_rules_is_told() -> None:
    model = Odd()
    graph = module_graph(model)
    assert [node.name for node in graph.nodes if node.params] == []
    assert uncovered_modules(model, graph) == {
        "": "Odd",
        "pair": "Bilinear",
        "normed.parametrizations.weight": "ParametrizationList",
        "codes": "Linear",
    }


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.LazyLinear(3), "weight has no shape yet"),
        (lambda: nn.Linear(2, 3, device="meta"), "weight is on the meta device"),
    ],
)
def test_weights_without_values_are_refused(layer: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        module_graph(nn.Sequential(layer()))
