"""The keys and values that attentions multiply, and the layers that compute them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.attentions import Attention, Fused, batches, blocks
from torch import nn

from quantizer.config.model import Settings
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.transformer_parts import CachedValue, cached_values
from quantizer.graph.tracing.trace import trace


def found(model: nn.Module) -> tuple[Graph, tuple[CachedValue, ...]]:
    graph = trace(model, (batches(1)[0],))
    return graph, cached_values(graph)


def layers(graph: Graph, cached: CachedValue) -> set[str]:
    return {graph.by_name[name].scope for name in cached.sources}


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str, int]] = {
    "as many keys as queries": (Attention, "k_proj", "v_proj", -1),
    "two heads for keys": (lambda: Attention(2), "k_proj", "v_proj", -1),
    "one head for keys, written out": (
        lambda: Attention(1, is_written_out=True),
        "k_proj",
        "v_proj",
        -2,
    ),
    "one layer for all": (Fused, "query_key_value", "query_key_value", -2),
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_found(name: str) -> None:
    attention, key_layer, value_layer, key_features = MODELS[name]
    graph, cached = found(blocks(attention(), attention()))
    assert [each.part for each in cached] == ["key", "value"] * 2
    for number, (key, value) in enumerate([cached[:2], cached[2:]]):
        prefix = f"layers.{number}.attn"
        assert layers(graph, key) == {f"{prefix}.{key_layer}"}
        assert layers(graph, value) == {f"{prefix}.{value_layer}"}
        assert (key.features, value.features) == (key_features, -1)
        for each in (key, value):
            node = graph.by_name[each.layer]
            assert node.scope == prefix
            assert node.input_roles()[each.role] == each.value


class Gate(nn.Module):
    """A softmax over what a layer computes, which no product before it makes an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        return weights @ self.up(x).transpose(1, 2) @ x


def test_a_softmax_over_the_output_of_a_layer_is_no_attention() -> None:
    assert found(blocks(Gate()))[1] == ()


FAMILIES = {
    "Llama": ("k_proj", "v_proj"),
    "GPT2": ("c_attn", "c_attn"),
    "Falcon": ("query_key_value", "query_key_value"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_of_transformers_models_are_found(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    from support.structures import IDS, pretrained

    if family == "Falcon":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": 64, "use_cache": False}
        config = transformers.FalconConfig(multi_query=True, **sizes)
        model = transformers.FalconForCausalLM(config).eval()
    else:
        model, _ = pretrained(family)
    graph = run_passes(trace(model, (IDS,)), Settings())
    cached = cached_values(graph)
    names = [{path.rpartition(".")[2] for path in layers(graph, each)} for each in cached]
    key, value = FAMILIES[family]
    assert names == [{key}, {value}] * 2
