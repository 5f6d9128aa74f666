"""What the config of a model asks for: as keys of a GGUF file, or as a reason why there is no
file.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import gguf

from quantizer.export.gguf.families import FLOAT_KEYS, LINEAR, Family
from quantizer.export.gguf.file import GgufValue

_GENERAL_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""The keys of all families, each with the config field that has the value."""
_TOKEN_FIELDS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_WIDTH_FIELDS = ("intermediate_size", "ffn_hidden_size", "n_inner")
"""The names of the width between the layers of a block; without one it is `_WIDENING` times the
width of the model.
"""
_WIDENING = 4
_OTHER_FIELDS = (
    *_WIDTH_FIELDS,
    "num_key_value_heads",
    "max_position_embeddings",
    "head_dim",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
)
"""What is read here."""
_INERT_FIELDS = (
    "max_window_layers",
    "num_kv_heads",
    "original_max_position_embeddings",
    "tie_word_embeddings",
    "use_qkv_bias",
    "initializer_range",
    "use_cache",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "output_router_logits",
    "output_hidden_states",
    "return_dict",
    "dtype",
    "architectures",
    "transformers_version",
    "id2label",
    "label2id",
)
"""Fields that change no output of a trained model, or repeat tensors or other fields."""
_DROPOUT_ENDINGS = ("_dropout", "_pdrop")
FULL_ATTENTION = "full_attention"
_WINDOWED = "sliding_attention"


def unsupported_setting(family: Family, config: Any) -> str | None:
    """Return what a config asks for that files of a family have no place for, as the end of a
    sentence about the model; None if there is nothing.
    """
    return next(_unsupported(family, config), None)


def setting_keys(family: Family, config: Any) -> dict[str, GgufValue]:
    """Return the keys of a config that is supported."""
    size = head_size(config)
    heads = config.num_attention_heads
    values: dict[str, Any] = {}
    for key, field in {**_GENERAL_KEYS, **family.keys}.items():
        values[key] = getattr(config, field)
    values["feed_forward_length"] = _WIDENING * config.hidden_size
    for field in _WIDTH_FIELDS:
        if getattr(config, field, None):
            values["feed_forward_length"] = getattr(config, field)
    values["attention.head_count_kv"] = getattr(config, "num_key_value_heads", heads)
    values["context_length"] = context_length(family, config)
    values["attention.key_length"] = size
    values["attention.value_length"] = size
    values |= _rotation_values(config, size)
    values |= family.constants
    keys: dict[str, GgufValue] = {}
    for name, value in values.items():
        if value is not None:
            number = float(value) if name in FLOAT_KEYS else value
            keys[f"{family.architecture}.{name}"] = typed(number)
    for token, field in _TOKEN_FIELDS.items():
        number = getattr(config, field, None)
        if isinstance(number, int) and number >= 0:
            keys[f"tokenizer.ggml.{token}_token_id"] = typed(number)
    return keys


def context_length(family: Family, config: Any) -> int:
    """Return how many tokens the engine may compute with.

    Without sliding windows in the engine, these are the tokens of a window.
    """
    length = int(getattr(config, "max_position_embeddings", 0))
    window = sliding_window(config)
    if window is None or family.window_period:
        return length
    return min(length, window)


def head_size(config: Any) -> int:
    """Return how many values a head has."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def rotations(config: Any) -> Mapping[str, Any]:
    """Return the parameters of rotations by type of layer; none if nothing is rotated."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return {FULL_ATTENTION: parameters} if "rope_theta" in parameters else parameters


def scaling_of(config: Any) -> str:
    """Return the type of the rotations in layers without a sliding window."""
    return str(rotations(config).get(FULL_ATTENTION, {}).get("rope_type", "default"))


def sliding_window(config: Any) -> int | None:
    """Return how many tokens some layers see; None if all see all of them."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and _WINDOWED not in layers:
        return None
    return getattr(config, "sliding_window", None)


def _rotation_values(config: Any, size: int) -> dict[str, Any]:
    by_layer = rotations(config)
    if not by_layer:
        return {}
    full = by_layer[FULL_ATTENTION]
    values = {
        "rope.dimension_count": int(size * full.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": full["rope_theta"],
    }
    if _WINDOWED in by_layer:
        values["rope.freq_base_swa"] = by_layer[_WINDOWED]["rope_theta"]
    if scaling_of(config) == LINEAR:
        values["rope.scaling.type"] = LINEAR
        values["rope.scaling.factor"] = full["factor"]
    return values


def typed(value: Any) -> GgufValue:
    """Return the value of a key, or a list, with the type that llama.cpp expects of such
    values.
    """
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    if not isinstance(value, list):
        return GgufValue(value, kinds[type(value)])
    element = kinds[type(value[0])]
    if element == gguf.GGUFValueType.UINT32:
        element = gguf.GGUFValueType.INT32
    return GgufValue(value, gguf.GGUFValueType.ARRAY, element)


def _unsupported(family: Family, config: Any) -> Iterator[str]:
    for field, value in family.required.items():
        if getattr(config, field) != value:
            yield f"has {field} {getattr(config, field)!r}, and llama.cpp assumes {value!r}"
    yield from _unsupported_heads(family, config)
    yield from _unsupported_windows(family, config)
    yield from _unsupported_rotations(family, config)
    yield from _fields_without_key(family, config)


def _unsupported_heads(family: Family, config: Any) -> Iterator[str]:
    size = head_size(config)
    width = config.hidden_size // config.num_attention_heads
    if size != width and not family.has_head_size:
        yield f"has heads of {size} values, and llama.cpp assumes {width}"
    scaled_by = getattr(config, "query_pre_attn_scalar", size)
    expected = width if config.num_hidden_layers == family.wide_layers else size
    if scaled_by != expected:
        yield f"has query_pre_attn_scalar {scaled_by}, and llama.cpp assumes {expected}"


def _unsupported_windows(family: Family, config: Any) -> Iterator[str]:
    if sliding_window(config) == 0:
        yield "has layers of sliding_attention with sliding_window 0"
    if not family.window_period:
        return
    for index, kind in enumerate(config.layer_types):
        expected = _WINDOWED if (index + 1) % family.window_period else FULL_ATTENTION
        if kind != expected:
            yield f"has {kind} in layer {index}, where llama.cpp assumes {expected}"


def _unsupported_rotations(family: Family, config: Any) -> Iterator[str]:
    by_layer = rotations(config)
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in parameters and FULL_ATTENTION in parameters:
        yield "has rope_parameters both for all layers and by type of layer"
    windowed = by_layer.get(_WINDOWED, {})
    base = by_layer.get(FULL_ATTENTION, {}).get("rope_theta")
    if windowed.get("rope_theta", base) != base and not family.rotates_windows:
        yield "has another rope_theta in layers of sliding_attention, which llama.cpp ignores"
    for kind, parameters in by_layer.items():
        scaling = parameters.get("rope_type", "default")
        is_scaled = scaling != "default"
        if is_scaled and (kind != FULL_ATTENTION or scaling not in family.scaled_rotations):
            yield f"has rotations of the type {scaling}"
        if parameters.get("partial_rotary_factor", 1.0) != 1.0 and not family.rotates_part:
            yield "rotates a part of each head"


def _fields_without_key(family: Family, config: Any) -> Iterator[str]:
    """Yield the fields without a key that differ from the default of the config's class."""
    known = {*_GENERAL_KEYS.values(), *_OTHER_FIELDS, *_INERT_FIELDS, *_TOKEN_FIELDS.values()}
    known |= {*family.required, *family.bias_fields}
    # Some families have names of their own for general fields
    known |= {config.attribute_map.get(field, field) for field in known}
    for field, parameter in inspect.signature(type(config)).parameters.items():
        value = getattr(config, field, parameter.default)
        has_key = field in family.keys.values() and value is not None
        is_known = has_key or field in known or field.endswith(_DROPOUT_ENDINGS)
        if not is_known and (value or None) != (parameter.default or None):
            yield f"has {field} {value!r}, for which a file has no key"
