"""The parts of language models that presets leave in float: heads and routers of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import llama, tokens

from quantizer import ModelQuantizer
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.inplace import InPlace
from quantizer.plan.resolve import resolve_plan

CONFIGS = Path("configs").resolve()
WEIGHT_INT8 = json.loads((CONFIGS / "weight_int8.json").read_text())
GATES = {"model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate"}


def mixture() -> Any:
    """A mixture of experts with a router and the gate of a shared expert."""
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return transformers.Qwen2MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def graph() -> Graph:
    """The trace of the mixture."""
    return trace(mixture(), (), tokens(1)[0])


def quantized(document: dict[str, Any], original: Graph) -> set[str]:
    """The paths of the layers whose weights a config quantizes."""
    config = check_document(Document.of(document, "config")).require()
    plan = resolve_plan(config, run_passes(original, config.settings), original)
    return {plan.graph.by_name[name].scope for name, role in plan.tensors if role == "weights"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_preset_leaves_routers_in_float(path: Path, graph: Graph) -> None:
    if path.stem in ("example", "dpu"):
        pytest.skip("is about another network, or a device without such models")
    layers = quantized(json.loads(path.read_text()), graph)
    assert "model.layers.0.mlp.experts" in layers or path.stem == "bfloat16"
    assert layers.isdisjoint(GATES)


def test_who_names_a_router_gets_it_quantized(graph: Graph) -> None:
    weight = WEIGHT_INT8["global_quant_config"]["weight"]
    entry = {"layer_quant_config": {"kind:router": {"weight": weight}}}
    assert quantized(WEIGHT_INT8 | entry, graph) >= GATES
    by_type = {"layer_type_quant_config": {"Linear": {"weight": weight}}}
    assert quantized(WEIGHT_INT8 | by_type, graph).isdisjoint(GATES)


def test_routers_stay_float_in_place() -> None:
    model = ModelQuantizer(WEIGHT_INT8).quantize_model(mixture())
    layers = {path for path, module in model.named_modules() if isinstance(module, InPlace)}
    assert "model.layers.0.mlp.shared_expert.up_proj" in layers
    assert layers.isdisjoint(GATES)


def test_routers_of_experts_that_are_numbered_in_words_stay_float_in_place() -> None:
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    config = transformers.SwitchTransformersConfig(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    routers = {path for path, _ in model.named_modules() if path.endswith("router.classifier")}
    model = ModelQuantizer(WEIGHT_INT8).quantize_model(model)
    layers = {path for path, module in model.named_modules() if isinstance(module, InPlace)}
    assert any("experts.expert_3.wi" in path for path in layers)
    assert routers and layers.isdisjoint(routers)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_stays_float_with_the_embedding_that_has_its_weight(is_tied: bool) -> None:
    model = llama(tie_word_embeddings=is_tied, use_cache=False)
    layers = quantized(WEIGHT_INT8, trace(model, (), tokens(1)[0]))
    assert "model.layers.0.mlp.up_proj" in layers
    assert "lm_head" not in layers
    assert ("model.embed_tokens" in layers) is not is_tied
