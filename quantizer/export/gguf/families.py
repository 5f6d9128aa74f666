"""The families of transformers that a GGUF file can hold without a template.

Source: the converters of llama.cpp (conversion/*.py), and the keys and tensors that its models
read (src/models/*.cpp).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gguf

FLOAT_KEYS = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
)
"""The keys whose values are stored as floats. A config may have them as integers."""
LINEAR = str(gguf.RopeScalingType.LINEAR.value)
LLAMA3 = "llama3"
_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_OLDER_NORM = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_MANY_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFT_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """How a family is stored.

    Attributes:
        architecture: its name in GGUF.
        keys: its own keys, each with the config field that has the value.
        constants: keys with a value that no field has.
        required: config fields without a key, each with the value that llama.cpp assumes.
        is_interleaved: whether the file has the rows of a head of queries and keys in another
            order. A rotation mixes a row of the first half with one of the second half. These
            are side by side there.
        has_grouped_heads: whether the model has the rows of query, key and value of a head
            together, and the file all queries, all keys and all values.
        is_transposed: whether the model has the matrices of blocks as [in, out].
        added: what the file adds to the weights of norms.
        renamed: parts of names of tensors, each with the part that the package gguf knows.
        left_out: the beginnings of names of tensors that the file does not have.
        has_head_size: whether heads may have another size than their share of the width.
        rotates_part: whether a head may be rotated in part.
        window_period: every so many layers one has no sliding window; 0 if llama.cpp has none.
        scaled_rotations: the types of scaled rotations that llama.cpp reads.
        rotates_windows: whether layers with a window have a rotation of their own.
        wide_layers: with so many layers, llama.cpp scales attention by the model's width for
            each head, and not by the size of a head.
        bias_fields: config fields about biases that llama.cpp reads if the file has them.
            transformers does not look for these.
        is_read: whether transformers takes all settings from the file. If not, it gets them
            from the model, and checks the tensors.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: _RMS_NORM)
    constants: Mapping[str, int] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    is_interleaved: bool = False
    has_grouped_heads: bool = False
    is_transposed: bool = False
    added: float = 0.0
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    has_head_size: bool = False
    rotates_part: bool = False
    window_period: int = 0
    scaled_rotations: tuple[str, ...] = ()
    rotates_windows: bool = False
    wide_layers: int = 0
    bias_fields: tuple[str, ...] = ()
    is_read: bool = False


_GEMMA3 = Family(
    "gemma3",
    keys=_RMS_NORM | _WINDOW | _SOFT_CAP,
    added=1.0,
    has_head_size=True,
    window_period=6,
    scaled_rotations=(LINEAR,),
    rotates_windows=True,
    wide_layers=62,
)
FAMILIES = {
    "llama": Family(
        "llama",
        is_interleaved=True,
        has_head_size=True,
        scaled_rotations=(LINEAR, LLAMA3),
        bias_fields=("attention_bias", "mlp_bias"),
        is_read=True,
    ),
    "mistral": Family(
        "llama",
        is_interleaved=True,
        has_head_size=True,
        scaled_rotations=(LINEAR, LLAMA3),
        is_read=True,
    ),
    "mixtral": Family(
        "llama", keys=_RMS_NORM | _EXPERTS, is_interleaved=True, has_head_size=True
    ),
    "qwen2": Family("qwen2", is_read=True),
    "qwen3": Family("qwen3", has_head_size=True),
    "qwen2_moe": Family(
        "qwen2moe",
        keys=_RMS_NORM
        | _MANY_EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        required=_UNTIED,
    ),
    "qwen3_moe": Family(
        "qwen3moe",
        keys=_RMS_NORM | _MANY_EXPERTS,
        required={"norm_topk_prob": True},
        has_head_size=True,
    ),
    "phi": Family("phi2", keys=_LAYER_NORM, required=_UNTIED, rotates_part=True),
    "phi3": Family("phi3", is_read=True),
    "gemma": Family("gemma", required=_TIED, added=1.0, has_head_size=True),
    "gemma2": Family(
        "gemma2",
        keys=_RMS_NORM
        | _WINDOW
        | _SOFT_CAP
        | {"attn_logit_softcapping": "attn_logit_softcapping"},
        required=_TIED,
        added=1.0,
        has_head_size=True,
        window_period=2,
        wide_layers=46,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(
        _GEMMA3,
        renamed={"model.language_model.": "model."},
        left_out=("model.vision_tower.", "model.multi_modal_projector."),
    ),
    "gpt2": Family("gpt2", keys=_OLDER_NORM, is_transposed=True),
    "gpt_neox": Family(
        "gptneox",
        keys=_LAYER_NORM | _PARALLEL,
        required=_UNTIED,
        has_grouped_heads=True,
        rotates_part=True,
    ),
    "bloom": Family(
        "bloom",
        keys=_OLDER_NORM,
        constants={"context_length": 2048},
        has_grouped_heads=True,
        renamed={"transformer.": ""},
    ),
    "falcon": Family("falcon", keys=_OLDER_NORM, constants={"attention.head_count_kv": 1}),
    "starcoder2": Family("starcoder2", keys={"attention.layer_norm_epsilon": "norm_epsilon"}),
    "stablelm": Family(
        "stablelm", keys=_LAYER_NORM | _PARALLEL, required=_UNTIED, rotates_part=True
    ),
    "cohere": Family(
        "command-r", keys=_LAYER_NORM | {"logit_scale": "logit_scale"}, required=_TIED
    ),
    "cohere2": Family(
        "cohere2",
        keys=_LAYER_NORM | _WINDOW | {"logit_scale": "logit_scale"},
        required=_TIED,
        window_period=4,
    ),
    "nemotron": Family(
        "nemotron",
        keys={"attention.layer_norm_epsilon": "norm_eps"},
        required=_UNTIED,
        added=1.0,
        rotates_part=True,
    ),
    "olmo2": Family("olmo2", required=_UNTIED),
    "olmo3": Family("olmo2", keys=_RMS_NORM | _WINDOW, required=_UNTIED, window_period=4),
    "granite": Family(
        "granite", keys=_RMS_NORM | _SCALES, is_interleaved=True, has_head_size=True
    ),
    "granitemoe": Family(
        "granitemoe",
        keys=_RMS_NORM | _EXPERTS | _SCALES,
        is_interleaved=True,
        has_head_size=True,
        renamed={
            "block_sparse_moe.router.weight": "mlp.gate.weight",
            "block_sparse_moe.experts.": "mlp.experts.",
        },
    ),
}
"""The families by `model_type`."""
