"""The keys and tensors of a GGUF file without a template, for known families.

Source: the converters of llama.cpp (conversion/*.py), and the keys that transformers reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from quantizer.config.wording import listed
from quantizer.errors import UsageError
from quantizer.export.gguf.families import FAMILIES, LLAMA3, Family
from quantizer.export.gguf.file import Arrangement, GgufTensor, GgufValue, Outline
from quantizer.export.gguf.settings import (
    FULL_ATTENTION,
    context_length,
    head_size,
    rotations,
    scaling_of,
    setting_keys,
    sliding_window,
    typed,
    unsupported_setting,
)
from quantizer.export.gguf.template import file_names
from quantizer.export.gguf.vocabulary import vocabulary_keys
from quantizer.export.hugging_face_folder import source_folder
from quantizer.option_words import Sentence
from quantizer.sources.files.json_files import embedding_modules, pooling_mode

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
    why = unsupported_setting(family, config)
    if why is not None:
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
        name = type(model).__name__
        vocabulary = vocabulary_keys(folder, config.vocab_size, name)
        remarks += _add_pooling(keys, family, folder)
    if vocabulary is None:
        no_words = {"tokenizer.ggml.model": typed("no_vocab")}
        vocabulary = no_words, (NO_TOKENIZER,)
    remarks += vocabulary[1]
    if family.left_out:
        remarks.append(_LANGUAGE_ALONE)
    window = sliding_window(config)
    if window is not None and not family.window_period:
        remarks.append(
            f"its context ends at {context_length(family, config)} tokens, since llama.cpp has "
            f"no sliding window in models of {family.architecture}"
        )
    read_config = config
    has_biases = any(getattr(config, name) for name in family.bias_fields)
    is_plain = window is None and scaling_of(config) == "default" and not has_biases
    if family.is_read and is_plain:
        read_config = None
    return Outline(
        family.architecture,
        keys | vocabulary[0],
        _tensors(family, config, state),
        constant=_frequencies(model, config),
        remarks=tuple(remarks),
        config=read_config,
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
        if piece not in names:
            text = f"<--deploy gguf>: the package gguf has no name for {source}"
            raise UsageError(text, help=TEMPLATE_HELP)
        arrangement = _arrangement(family, config, names[piece])
        tensors[names[piece]] = (source, replace(arrangement, half=half))
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
