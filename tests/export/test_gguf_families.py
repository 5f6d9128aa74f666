"""Files without a template: llama.cpp computes with them what each family of models does, and a
setting that files have no place for is refused before calibration.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.llama_cpp import next_probabilities, served
from support.runs import ROOT

from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS
from quantizer.export.transformers_models import state_of

for package in EXPORTERS["gguf"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
sys.path.append(str(ROOT / "benchmarks"))

import transformers
from engines.families.models import FAMILIES, VOCABULARY, Family, spread_weights

from quantizer.export.gguf.architectures import outline_of_architecture
from quantizer.export.gguf.families import FAMILIES as STORED
from quantizer.export.gguf.file import Outline, stored_tensors, typed, write_gguf

LEAST_DB = 60
"""llama.cpp has a table of GELU in half precision, and rounds no inputs of float weights."""
THETA = {"rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PART = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA}}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LOCAL = {"rope_type": "default", "rope_theta": 300.0}
SIZES = FAMILIES["qwen2"].sizes
WINDOWS = {**SIZES, "num_hidden_layers": 5, "sliding_window": 8}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
MORE = {
    "gemma": Family("Gemma", "Gemma", FAMILIES["llama"].sizes),
    "cohere2": Family("Cohere 2", "Cohere2", WINDOWS),
    "olmo3": Family("OLMo 3", "Olmo3", WINDOWS),
    "nemotron": Family("Nemotron", "Nemotron", {**SIZES, "head_dim": 32}),
    "qwen2_moe": Family(
        "Qwen2 MoE", "Qwen2Moe", {**SIZES, **SHARED, "num_experts": 4, "num_experts_per_tok": 2}
    ),
}
"""Families that the table of engines does not have."""
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3 | THETA} | TIED,
    "llama, linear": {"rope_parameters": LINEAR | THETA},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": TIED,
    "qwen3": {"head_dim": 32},
    "phi": PART,
    "phi3": {},
    "gemma2": {"num_hidden_layers": 3, "sliding_window": 4, "final_logit_softcapping": 3.0},
    "gemma2, as 27B": {
        "num_hidden_layers": 46,
        "hidden_size": 128,
        "query_pre_attn_scalar": 64,
    },
    "gemma3": {
        "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": LINEAR | THETA, "sliding_attention": LOCAL},
    },
    "gemma3, capped": {"final_logit_softcapping": 5.0} | UNTIED,
    "gpt2": {"n_inner": 128},
    "gpt_neox": {"use_parallel_residual": False} | PART,
    "bloom": {},
    "falcon": {"ffn_hidden_size": 128},
    "starcoder2": {"sliding_window": 32},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True} | PART,
    "stablelm, in turn": {},
    "cohere": {"logit_scale": 0.5},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3} | TIED,
    "mixtral": {},
    "qwen3_moe": TIED,
    "granite_moe": {},
    **{name: {} for name in MORE},
}
"""More settings of a small model, by its name and what is special."""


def model_of(name: str, settings: dict[str, Any]) -> Any:
    family = (FAMILIES | MORE)[name.partition(",")[0]]
    return replace(family, sizes={**family.sizes, **settings}).model()


def outline_of(model: Any) -> Outline:
    return outline_of_architecture(model, state_of(model))


def test_each_family_that_files_hold_is_run_in_llama_cpp() -> None:
    tried = {model_of(name, {}).config.model_type for name in CASES}
    assert {*tried, "gemma3"} == {*STORED}


@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_the_float_model(name: str, tmp_path: Path) -> None:
    """The sequence is longer than the sliding windows."""
    require_equal_logits(model_of(name, CASES[name]), tmp_path)


def test_the_language_model_of_a_gemma_3_that_sees_is_written(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    settings = transformers.Gemma3Config(
        text_config=dict(FAMILIES["gemma3"].sizes),
        vision_config=vision | layers,
        mm_tokens_per_image=1,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(settings).eval().requires_grad_(False)
    spread_weights(model)
    assert "has the language model alone" in outline_of(model).remarks[-1]
    require_equal_logits(model, tmp_path)


def require_equal_logits(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, the CPU binding of llama.cpp")
    outline = outline_of(model)
    tensors = stored_tensors(outline, {}, state_of(model))
    assert {tensor.type for tensor in tensors.values()} == {"F32"}
    write_gguf(tmp_path / "float.gguf", with_words(outline), tensors)
    ids = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits[0, -1]
    server = served(tmp_path / "float.gguf")
    found, _ = next_probabilities(server, ids[0].tolist(), VOCABULARY)
    noise = (found - found.mean()) - (expected - expected.mean())
    assert 20 * float(torch.log10(expected.std() / noise.std())) > LEAST_DB


def with_words(outline: Outline) -> Outline:
    """The file with a text for each token, without which llama.cpp gives no answer."""
    words = ["<unk>", "<s>", "</s>", "<0x0A>", "<|endoftext|>"]
    words += map(str, range(len(words), VOCABULARY))
    types = [2, 3, 3, 6, *[1] * (VOCABULARY - 4)]
    lists = {"tokens": words, "token_type": types, "scores": [0.0] * VOCABULARY}
    keys = {f"tokenizer.ggml.{name}": typed(values) for name, values in lists.items()}
    return replace(
        outline, keys={**outline.keys, **keys, "tokenizer.ggml.model": typed("llama")}
    )


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | THETA}, "dynamic"),
    ("llama", {"hidden_act": "gelu"}, "has hidden_act 'gelu', for which a file has no key"),
    ("qwen2", {"rope_parameters": LINEAR | THETA}, "has rotations of the type linear"),
    ("phi3", PART, "rotates a part of each head"),
    ("gemma3", {"query_pre_attn_scalar": 64}, "scalar 64, and llama.cpp assumes 32"),
    ("gemma2", {"attn_logit_softcapping": None}, "has attn_logit_softcapping None"),
    ("gemma2", UNTIED, "has tie_word_embeddings False, and llama.cpp assumes True"),
    (
        "gemma2",
        {"layer_types": ["full_attention", "full_attention"]},
        "has full_attention in layer 0, where llama.cpp assumes sliding_attention",
    ),
    ("stablelm", {"qk_layernorm": True}, "has qk_layernorm True"),
    ("olmo2", TIED, "has tie_word_embeddings True, and llama.cpp assumes False"),
    ("starcoder2", {"head_dim": 16}, "has heads of 16 values, and llama.cpp assumes 32"),
    ("falcon", {"alibi": True}, "has alibi True"),
    ("qwen2_moe", TIED, "has tie_word_embeddings True, and llama.cpp assumes False"),
    (
        "qwen2_moe",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "has layers of sliding_attention with sliding_window 0",
    ),
    (
        "olmo3",
        {"rope_parameters": {"full_attention": {**THETA}, "sliding_attention": LOCAL}},
        "has another rope_theta in layers of sliding_attention",
    ),
    ("olmo3", {"rope_parameters": dict(THETA)}, "both for all layers and by type of layer"),
    ("qwen3_moe", {"norm_topk_prob": False}, "has norm_topk_prob False"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"has mlp_only_layers \[0\]"),
    ("opt", {}, "this model is opt, which needs a template"),
]


@pytest.mark.parametrize(("name", "settings", "why"), REFUSED)
def test_what_no_key_says_is_refused(name: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        outline_of(model_of(name, settings))
    assert "--gguf_template FILE" in str(refused.value.help)


def test_without_windows_in_llama_cpp_the_context_ends_where_a_window_does() -> None:
    outline = outline_of(model_of("mistral", {"sliding_window": 8}))
    assert outline.keys["llama.context_length"].value == 8
    assert "its context ends at 8 tokens" in outline.remarks[-1]
    whole = outline_of(model_of("mistral", {"sliding_window": 4096}))
    assert whole.keys["llama.context_length"].value == 64


def test_what_is_added_to_norms_is_added_in_float32() -> None:
    """In bfloat16, 1 + weight would lose the weight's last bits."""
    model = model_of("gemma3", {}).bfloat16()
    tensors = stored_tensors(outline_of(model), {}, state_of(model))
    weight = model.model.norm.weight.float()
    assert np.array_equal(tensors["output_norm.weight"].data, (weight + 1).numpy())
    assert not torch.equal((weight + 1).bfloat16().float(), weight + 1)
