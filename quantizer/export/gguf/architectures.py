"""GGUF files without a template: the keys of the architectures that are known here, and the
rows that they permute.

Source: the converters of llama.cpp (convert_hf_to_gguf.py), and what transformers reads of
keys.
"""

from collections.abc import Mapping
from typing import Any

import gguf
from torch import Tensor, nn

from quantizer.errors import UsageError
from quantizer.export.gguf.file import Arrangement, Entry, Outline
from quantizer.export.gguf.template import names_of

TEMPLATE = (
    "give --gguf_template FILE, any .gguf of the same model, whose keys and tokenizer are kept"
)
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
}
"""The architecture in GGUF for each `model_type`."""
_PERMUTED = {"llama": {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}}
"""The tensors whose rows of heads are interleaved, and where their number is."""
_INTEGERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
NO_TOKENIZER = "it has no tokenizer, so engines take and give numbers of tokens: " + TEMPLATE


def outline_of(model: nn.Module, state: Mapping[str, Tensor]) -> Outline:
    """The keys and names of a model of transformers.

    Raises:
        UsageError: its architecture, or something that its config asks for, has no keys here.
    """
    config: Any = model.config
    described = config.to_dict()
    architecture = ARCHITECTURES.get(config.model_type)
    why = f"is {config.model_type}" if architecture is None else _unheld(described)
    if architecture is None or why:
        known = ", ".join(ARCHITECTURES)
        said = (
            f"--deploy gguf: without a template the model is to be one of {known}, without "
            f"extras: this one {why}"
        )
        raise UsageError(said, help=TEMPLATE)
    names = names_of(
        architecture, config.num_hidden_layers, {source: source for source in state}
    )
    nameless = [source for source in state if source not in names]
    if nameless:
        raise UsageError(
            f"--deploy gguf: the package gguf has no name for {nameless[0]}", help=TEMPLATE
        )
    permuted = {part: described[key] for part, key in _PERMUTED.get(architecture, {}).items()}
    tensors = {
        name: (
            source,
            Arrangement(next((heads for part, heads in permuted.items() if part in name), 0)),
        )
        for source, name in names.items()
    }
    return Outline(
        architecture,
        _keys(architecture, type(model).__name__, described),
        tensors,
        remarks=(NO_TOKENIZER,),
    )


def _unheld(config: Mapping[str, Any]) -> str | None:
    """What of a config would need more keys, or tensors of its own."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"has rotations of the type {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "rotates a part of each head"
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return "has sliding windows"
    return None


def _keys(architecture: str, name: str, config: Mapping[str, Any]) -> dict[str, Entry]:
    whole, real, text = (gguf.GGUFValueType[kind] for kind in ("UINT32", "FLOAT32", "STRING"))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {key: Entry(config[field], whole) for key, field in _INTEGERS.items()}
    found |= {
        key: Entry(head, whole)
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length")
    }
    found["attention.layer_norm_rms_epsilon"] = Entry(config["rms_norm_eps"], real)
    found["rope.freq_base"] = Entry(config["rope_parameters"]["rope_theta"], real)
    keys = {"general.name": Entry(name, text), "general.quantization_version": Entry(2, whole)}
    keys |= {f"{architecture}.{key}": entry for key, entry in found.items()}
    keys["tokenizer.ggml.model"] = Entry("no_vocab", text)
    for key, field in _TOKENS.items():
        if isinstance(config.get(field), int):
            keys[f"tokenizer.ggml.{key}_token_id"] = Entry(config[field], whole)
    return keys
