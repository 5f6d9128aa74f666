"""The keys and tensors of a GGUF file without a template, for known families.

Source: the converters of llama.cpp (conversion/*.py), and the keys that transformers reads.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from quantizer.config.wording import listed
from quantizer.errors import UsageError
from quantizer.export.gguf.families import FAMILIES, FLOAT_KEYS, LINEAR, LLAMA3, Family
from quantizer.export.gguf.file import Arrangement, GgufTensor, GgufValue, Outline, typed
from quantizer.export.gguf.template import file_names
from quantizer.export.gguf.vocabulary import vocabulary_keys
from quantizer.export.hugging_face_folder import source_folder
from quantizer.option_words import Sentence
from quantizer.sources.json_files import embedding_modules, pooling_mode

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


def setting_keys(family: Family, config: Any) -> dict[str, GgufValue]:
    """Return the keys of a config that is supported."""
    size = head_size(config)
    heads = config.num_attention_heads
    fields = {**_GENERAL_KEYS, **family.keys}
    values: dict[str, Any] = {key: getattr(config, field) for key, field in fields.items()}
    stated = [getattr(config, field, None) for field in _WIDTH_FIELDS]
    widths = [_WIDENING * config.hidden_size, *filter(None, stated)]
    values |= {
        "feed_forward_length": widths[-1],
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "context_length": context_length(family, config),
        "attention.key_length": size,
        "attention.value_length": size,
        **_rotation_values(config, size),
        **family.constants,
    }
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
    return length if window is None or family.window_period else min(length, window)


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


def _unsupported(family: Family, config: Any) -> Iterator[str]:
    """Yield what a config asks for that files of a family have no place for, as the end of a
    sentence about the model.
    """
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
        known = family.scaled_rotations if kind == FULL_ATTENTION else ()
        if scaling not in ("default", *known):
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


TEMPLATE_HELP = (
    "give <--gguf_template FILE>, any .gguf of the same model, whose keys and tokenizer are "
    "kept"
)
NO_TOKENIZER = Sentence(
    "it has no tokenizer, because there is no tokenizer.json of a known kind, and engines take "
    f"and give numbers of tokens: {TEMPLATE_HELP}"
)
_LANGUAGE_ALONE = (
    "it has the language model alone: llama.cpp reads the part for images from another file, "
    "which `convert_hf_to_gguf.py --mmproj` writes"
)
_GATE_AND_UP = "gate_up_proj"
_HALVES = ("gate_proj", "up_proj")
_OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""Tensors with a matrix for each expert. The rows of the first one become two tensors."""
_POOLING_TYPES = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "last": gguf.PoolingType.LAST,
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
"""The modules of Sentence Transformers that llama.cpp runs: it normalizes all embeddings."""
_SPEEDS = ".inv_freq"
"""The angle per token of each pair of values that is rotated."""


def outline_of_architecture(model: nn.Module, state: Mapping[str, Tensor]) -> Outline:
    """Return the keys and names of a model of transformers.

    Raises:
        UsageError: its family, or something that its config asks for, is not known here.
    """
    whole_config: Any = model.config
    config = whole_config.get_text_config()
    family = FAMILIES.get(whole_config.model_type)
    if family is None:
        kind = whole_config.model_type
        text = f"<--deploy gguf>: this model is {kind}, which needs a template"
        known = f"these need none: {', '.join(FAMILIES)}"
        raise UsageError(text, help=f"{TEMPLATE_HELP}; {known}")
    for why in _unsupported(family, config):
        text = f"<--deploy gguf>: this model {why}"
        raise UsageError(text, help=TEMPLATE_HELP)
    keys = {
        "general.name": typed(type(model).__name__),
        "general.quantization_version": typed(2),
        **setting_keys(family, config),
    }
    remarks: list[str] = []
    folder = source_folder(model)
    vocabulary = None
    if folder is not None:
        vocabulary = vocabulary_keys(folder, config.vocab_size, type(model).__name__)
        remarks += _add_pooling(keys, family, folder)
    if vocabulary is None:
        vocabulary = {"tokenizer.ggml.model": typed("no_vocab")}, (NO_TOKENIZER,)
    remarks += vocabulary[1]
    if family.left_out:
        remarks.append(_LANGUAGE_ALONE)
    window = sliding_window(config)
    if window is not None and not family.window_period:
        remarks.append(
            f"its context ends at {context_length(family, config)} tokens, since llama.cpp has "
            f"no sliding window in models of {family.architecture}"
        )
    has_biases = any(getattr(config, name) for name in family.bias_fields)
    is_plain = window is None and scaling_of(config) == "default" and not has_biases
    return Outline(
        family.architecture,
        keys | vocabulary[0],
        _tensors(family, config, state),
        constant=_frequencies(model, config),
        remarks=tuple(remarks),
        config=None if family.is_read and is_plain else config,
    )


def _add_pooling(keys: dict[str, GgufValue], family: Family, folder: Path) -> Iterator[str]:
    """Add the key that says how tokens become one embedding, and yield what llama.cpp does
    otherwise than the modules of the folder.
    """
    mode = pooling_mode(folder)
    if mode in _POOLING_TYPES:
        keys[f"{family.architecture}.pooling_type"] = typed(int(_POOLING_TYPES[mode]))
    elif mode is not None:
        yield f"llama.cpp does not know how its embeddings are pooled, by {mode}"
    kinds = {module.kind for module in embedding_modules(folder)}
    further = sorted(kinds.difference(_KNOWN_MODULES))
    if further:
        yield f"it ends before {listed(further)} of modules.json, which llama.cpp does not run"


def _tensors(
    family: Family, config: Any, state: Mapping[str, Tensor]
) -> dict[str, tuple[str, Arrangement]]:
    """Return the tensors of a file.

    Raises:
        UsageError: the package gguf has no name for one.
    """
    pieces = dict(_pieces(family, state))
    names = file_names(family.architecture, config.num_hidden_layers, pieces)
    tensors: dict[str, tuple[str, Arrangement]] = {}
    for piece, (source, half) in pieces.items():
        name = names.get(piece)
        if name is None:
            text = f"<--deploy gguf>: the package gguf has no name for {source}"
            raise UsageError(text, help=TEMPLATE_HELP)
        tensors[name] = (source, replace(_arrangement(family, config, name), half=half))
    return tensors


def _pieces(
    family: Family, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """Yield the tensors of a file by names that the package gguf knows: the name in the model,
    and which half of an expert's rows a tensor has.
    """
    for source in state:
        if source.startswith(family.left_out):
            continue
        name = source
        for part, known in family.renamed.items():
            name = name.replace(part, known)
        if not name.endswith(_OF_EXPERTS):
            yield name, (source, None)
        elif not name.endswith(_GATE_AND_UP):
            yield f"{name}.weight", (source, None)
        else:
            stem = name.removesuffix(_GATE_AND_UP)
            for index, layer in enumerate(_HALVES):
                yield f"{stem}{layer}.weight", (source, index)


def _arrangement(family: Family, config: Any, name: str) -> Arrangement:
    """Return how a family stores the tensor with this name in a file."""
    heads = config.num_attention_heads
    if name.endswith("norm.weight"):
        return Arrangement(added=family.added)
    if family.is_transposed and name.startswith("blk.") and name.endswith(".weight"):
        return Arrangement(is_transposed=True)
    if family.has_grouped_heads and ".attn_qkv." in name:
        return Arrangement(grouped_heads=heads)
    if family.is_interleaved and ".attn_q." in name:
        return Arrangement(heads)
    if family.is_interleaved and ".attn_k." in name:
        return Arrangement(config.num_key_value_heads)
    return Arrangement()


def _frequencies(model: nn.Module, config: Any) -> dict[str, GgufTensor]:
    """Return the factor of each period of rotations, if no key says how they are scaled."""
    if scaling_of(config) != LLAMA3:
        return {}
    base, size = rotations(config)[FULL_ATTENTION]["rope_theta"], head_size(config)
    [scaled] = [buffer for name, buffer in model.named_buffers() if name.endswith(_SPEEDS)]
    unscaled = base ** -(torch.arange(0, size, 2) / size)
    factors = unscaled / scaled.cpu()
    return {"rope_freqs.weight": GgufTensor(factors.float().numpy(), "F32")}
