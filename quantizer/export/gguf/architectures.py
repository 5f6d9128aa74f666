"""The keys and tensor names of a GGUF file without a template, for known architectures.

Source: the converters of llama.cpp (convert_hf_to_gguf.py), and the keys that transformers
reads.
"""

from collections.abc import Mapping
from typing import Any

import gguf
from torch import Tensor, nn

from quantizer.errors import UsageError
from quantizer.export.gguf.file import Arrangement, GgufValue, Outline
from quantizer.export.gguf.template import file_names

TEMPLATE_HELP = (
    "give --gguf_template FILE, any .gguf of the same model, whose keys and tokenizer are kept"
)
# The architecture in GGUF for each `model_type`.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
}
# The tensors whose rows of heads are interleaved, and the config field with their number.
_PERMUTED = {"llama": {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}}
_INTEGER_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_HEAD_SIZE_KEYS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
# The sizes of heads that transformers takes without a look at the file.
_READERS_HEAD_SIZE = {"qwen3": 128}
_TOKEN_FIELDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
NO_TOKENIZER = (
    f"it has no tokenizer, so engines take and give numbers of tokens: {TEMPLATE_HELP}"
)


def outline_of_architecture(model: nn.Module, state: Mapping[str, Tensor]) -> Outline:
    """Return the keys and names of a model of transformers.

    Raises:
        UsageError: its architecture, or something that its config asks for, is not known here.
    """
    config: Any = model.config
    fields = config.to_dict()
    architecture = ARCHITECTURES.get(config.model_type)
    why = f"is {config.model_type}" if architecture is None else _unknown_feature(fields)
    if architecture is None or why:
        known = ", ".join(ARCHITECTURES)
        text = (
            f"--deploy gguf: this model {why}; without a template, only {known} are supported, "
            "without extras"
        )
        raise UsageError(text, help=TEMPLATE_HELP)
    sources = {source: source for source in state}
    names = file_names(architecture, config.num_hidden_layers, sources)
    nameless = [source for source in state if source not in names]
    if nameless:
        raise UsageError(
            f"--deploy gguf: the package gguf has no name for {nameless[0]}", help=TEMPLATE_HELP
        )
    tensors: dict[str, tuple[str, Arrangement]] = {}
    for source, name in names.items():
        heads = 0
        for part, field in _PERMUTED.get(architecture, {}).items():
            if part in name:
                heads = fields[field]
        tensors[name] = (source, Arrangement(heads))
    keys = _keys(architecture, type(model).__name__, fields)
    return Outline(architecture, keys, tensors, remarks=(NO_TOKENIZER,))


def _unknown_feature(fields: Mapping[str, Any]) -> str | None:
    """Return what in a config would need more keys, or tensors of its own."""
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"has rotations of the type {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotates a part of each head"
    head_size = _READERS_HEAD_SIZE.get(fields["model_type"])
    if head_size is not None and fields["head_dim"] != head_size:
        return f"has heads of {fields['head_dim']} values, and transformers reads {head_size}"
    if fields.get("sliding_window") and fields.get("use_sliding_window") is not False:
        return "has sliding windows"
    return None


def _keys(architecture: str, name: str, fields: Mapping[str, Any]) -> dict[str, GgufValue]:
    integer = gguf.GGUFValueType.UINT32
    real = gguf.GGUFValueType.FLOAT32
    text = gguf.GGUFValueType.STRING
    keys = {
        "general.name": GgufValue(name, text),
        "general.quantization_version": GgufValue(2, integer),
    }
    for key, field in _INTEGER_FIELDS.items():
        keys[f"{architecture}.{key}"] = GgufValue(fields[field], integer)
    head_size = fields.get("head_dim")
    if not head_size:
        head_size = fields["hidden_size"] // fields["num_attention_heads"]
    for key in _HEAD_SIZE_KEYS:
        keys[f"{architecture}.{key}"] = GgufValue(head_size, integer)
    epsilon = GgufValue(fields["rms_norm_eps"], real)
    keys[f"{architecture}.attention.layer_norm_rms_epsilon"] = epsilon
    base = GgufValue(fields["rope_parameters"]["rope_theta"], real)
    keys[f"{architecture}.rope.freq_base"] = base
    keys["tokenizer.ggml.model"] = GgufValue("no_vocab", text)
    for key, field in _TOKEN_FIELDS.items():
        if isinstance(fields.get(field), int):
            keys[f"tokenizer.ggml.{key}_token_id"] = GgufValue(fields[field], integer)
    return keys
