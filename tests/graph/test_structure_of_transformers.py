"""Blocks, groups and folds of transformers' own models: no architecture is known beforehand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.extended import extended_except
from support.structures import CONFIGS, changed_by_folding, modules_of, prepared, pretrained

from quantizer.graph.ir import Graph
from quantizer.graph.names import layer_path
from quantizer.graph.structure.definitions import InputGroup, Structure
from quantizer.graph.structure.find import find_structure

pytest.importorskip("transformers", reason="the models are those of transformers (extra: llm)")
pytestmark = pytest.mark.slow

GATED = {
    ("q_proj", "k_proj", "v_proj"): "input_layernorm",
    ("o_proj",): "v_proj",
    ("gate_proj", "up_proj"): "post_attention_layernorm",
    ("down_proj",): "up_proj",
}
GELU = "no factor passes through"
FOLDS: dict[str, dict[tuple[str, ...], str]] = {
    "Llama": GATED,
    "Qwen2": GATED,
    "Mistral": GATED,
    "Gemma": GATED,
    "Phi3": {
        ("qkv_proj",): "input_layernorm",
        ("o_proj",): "qkv_proj",
        ("gate_up_proj",): "post_attention_layernorm",
        ("down_proj",): "gate_up_proj",
    },
    "Olmo2": {  # norms come after
        ("q_proj", "k_proj", "v_proj"): "no factor passes through",
        ("o_proj",): "v_proj",
        ("gate_proj", "up_proj"): "no factor passes through",
        ("down_proj",): "up_proj",
    },
    "Cohere": {  # attention and MLP side by side
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"): "input_layernorm",
        ("o_proj",): "v_proj",
        ("down_proj",): "up_proj",
    },
    "GPTNeoX": {
        ("query_key_value",): "input_layernorm",
        ("dense",): "query_key_value",
        ("dense_h_to_4h",): "post_attention_layernorm",
        ("dense_4h_to_h",): GELU,
    },
    "OPT": {
        ("q_proj", "k_proj", "v_proj"): "self_attn_layer_norm",
        ("out_proj",): "v_proj",
        ("fc1",): "final_layer_norm",
        ("fc2",): "fc1",  # by way of a ReLU
    },
    "GPT2": {("c_attn",): "ln_1", ("c_proj",): "c_attn", ("c_fc",): "ln_2"},
    "Bert": {
        # Norms come after, around them flows their input
        ("query", "key", "value"): "is also read by",
        ("dense",): "value",
    },
    "ViT": {
        ("q_proj", "k_proj", "v_proj"): "layernorm_before",
        ("o_proj",): "v_proj",
        ("fc1",): "layernorm_after",
        ("fc2",): GELU,
    },
    "Mixtral": {  # the layers of experts are called as their tensors
        ("q_proj", "k_proj", "v_proj"): "input_layernorm",
        ("o_proj",): "v_proj",
        ("gate",): "post_attention_layernorm",
        ("gate_up_proj",): "post_attention_layernorm",
        ("down_proj",): "gate_up_proj",
    },
}


@cache
def found(family: str) -> tuple[Graph, tuple[Any, ...], Structure]:
    model, inputs = pretrained(family)
    graph = prepared(model, *inputs)
    return graph, inputs, find_structure(graph)


def place(graph: Graph, group: InputGroup) -> str:
    """The module that takes the factors, or why there is none."""
    if group.fold is None:
        return group.why_not
    node = graph.by_name[group.fold.node]
    path = (
        node.params["weight"].rpartition(".")[0] if node.op == "parameter" else layer_path(node)
    )
    return path.rpartition(".")[2]


USUAL = ("Llama", "GPT2", "T5", "Bert", "ViT", "Mixtral", "Olmo2")


@pytest.mark.parametrize("family", extended_except(CONFIGS, *USUAL))
def test_a_fold_keeps_the_function(family: str) -> None:
    graph, inputs, structure = found(family)
    assert sum(group.fold is not None for group in structure.groups) >= 2
    assert changed_by_folding(graph, inputs, structure) < 1e-5


def test_the_check_sees_a_fold_that_does_not() -> None:
    graph, inputs, structure = found("OPT")
    assert changed_by_folding(graph, inputs, structure, divide=False) > 0.01


@pytest.mark.parametrize("family", extended_except(FOLDS, *set(USUAL).intersection(FOLDS)))
def test_the_groups_of_the_last_block_and_where_they_fold(family: str) -> None:
    graph, _, structure = found(family)
    groups = [group for group in structure.groups if group.block == 1]
    places = {}
    for group in groups:
        places.setdefault(tuple(modules_of(graph, group.layers)), place(graph, group))
    for layers, expected in FOLDS[family].items():
        assert expected in places[layers], layers


@pytest.mark.parametrize(
    ("family", "paths"),
    [
        ("Llama", ["model.layers.0", "model.layers.1"]),
        ("OPT", ["model.decoder.layers.0", "model.decoder.layers.1"]),
        ("GPT2", ["transformer.h.0", "transformer.h.1"]),
        ("Bert", ["encoder.layer.0", "encoder.layer.1"]),
        ("ViT", ["layers.0", "layers.1"]),
        ("T5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
    ],
)
def test_blocks_are_runs_of_nodes_that_do_not_overlap(family: str, paths: list[str]) -> None:
    graph, _, structure = found(family)
    assert [block.path for block in structure.blocks] == paths
    for block in structure.blocks:
        run = graph.nodes[block.start : block.stop]
        assert run[0].scope.startswith(block.path) and run[-1].scope.startswith(block.path)
        outside = (*graph.nodes[: block.start], *graph.nodes[block.stop :])
        assert not any(f"{node.scope}.".startswith(f"{block.path}.") for node in outside)
    assert all(
        a.stop <= b.start for a, b in zip(structure.blocks, structure.blocks[1:], strict=False)
    )


@pytest.mark.parametrize("family", extended_except(CONFIGS, *USUAL))
def test_every_layer_is_in_one_group_and_groups_follow_their_values(family: str) -> None:
    graph, _, structure = found(family)
    layers = [layer for group in structure.groups for layer in group.layers]
    assert sorted(layers) == sorted(
        n.name for n in graph.nodes if n.op in ("linear", "expert_linear", "conv2d")
    )
    index = {node.name: at for at, node in enumerate(graph.nodes)}
    sources = [index[group.source] for group in structure.groups]
    assert sources == sorted(sources)
    for group in structure.groups:
        assert {graph.by_name[layer].inputs["input"].name for layer in group.layers} == {
            group.source
        }


def test_heads_of_queries_share_the_channels_of_a_value() -> None:
    _, _, structure = found("Llama")
    fold = next(g.fold for g in structure.groups if "o_proj" in g.layers[0])
    assert fold is not None and fold.channels == (
        *range(8),
        *range(8),
        *range(8, 16),
        *range(8, 16),
    )


def test_the_values_of_a_fused_projection_are_its_last_rows() -> None:
    _, _, structure = found("GPT2")
    fold = next(g.fold for g in structure.groups if "attn]/Conv1D[c_proj]" in g.layers[0])
    assert fold is not None and fold.channels == tuple(range(64, 96))


def test_a_norm_of_one_plus_its_weight_says_so() -> None:
    _, _, structure = found("Gemma")
    assert {g.fold.offset for g in structure.groups if g.fold and g.fold.kind == "norm"} == {
        1.0
    }


def test_cross_attention_reads_one_value_in_all_blocks() -> None:
    graph, _, structure = found("T5")
    group = next(
        g for g in structure.groups if "EncDecAttention" in g.layers[0] and len(g.layers) > 1
    )
    assert modules_of(graph, group.layers) == ["k", "v", "k", "v"]
    assert group.block is None


def test_a_head_that_has_the_weights_of_the_embedding_is_left_alone() -> None:
    graph, _, structure = found("Mistral")
    assert structure.groups[-1].tied == tuple(
        node.name for node in graph.nodes if node.op == "embedding"
    )
    assert structure.groups[-1].fold is None
    assert "its weight is also that of" in structure.groups[-1].why_not


def test_layers_behind_two_views_of_one_value_are_changed_together() -> None:
    # A shared expert, a router and experts read the norm by ways of their own
    graph, _, structure = found("Qwen2Moe")
    fold = next(g.fold for g in structure.groups if "shared_expert]" in g.layers[0])
    assert fold is not None and fold.kind == "norm"
    assert sorted(modules_of(graph, fold.extra)) == ["gate", "gate_up_proj"]
