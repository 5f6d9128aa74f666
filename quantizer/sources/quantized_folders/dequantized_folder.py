"""Dequantize the weights of a Hugging Face folder, each when it is needed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizer.config.json_types import JsonMapping
from quantizer.config.wording import counted, listed
from quantizer.errors import ModelError
from quantizer.sources.hugging_face.deferred_checkpoint import Dequantize
from quantizer.sources.json_files import (
    CONFIG_FILE,
    FLOAT_FOLDER_HELP,
    GPTQ_FILE,
    QUANTIZATION_KEY,
    QUANTIZATION_KEYS,
    read_object,
)
from quantizer.sources.quantized_folders.compressed_reader import CompressedTensorsReader
from quantizer.sources.quantized_folders.layer_readers import (
    AwqReader,
    Fp8Reader,
    GptqReader,
    Mxfp4Reader,
)
from quantizer.sources.quantized_folders.stored_layer import (
    FLOAT8_DTYPES,
    LayerReader,
    MethodSettings,
    split_into_layers,
)
from quantizer.storage.deferred_tensor import DeferredTensor

READERS: Mapping[str, Callable[[MethodSettings, torch.dtype], LayerReader]] = {
    "awq": AwqReader,
    "compressed-tensors": CompressedTensorsReader,
    "fp8": Fp8Reader,
    "gptq": GptqReader,
    "mxfp4": Mxfp4Reader,
}
"""What dequantizes the layers of a folder, by `quant_method`."""
_IGNORED_STEMS = ("input", "output", "activation", "q", "k", "v")
_IGNORED_ENDINGS = ("scale", "zero_point", "global_scale")


def dequantizer_of(folder: Path, config: JsonMapping) -> Dequantize | None:
    """Return what dequantizes the weights of a folder, or None if they are float.

    Args:
        folder: of the model.
        config: its config.json.

    Raises:
        ModelError: by a method that cannot be dequantized.
    """
    file = folder / CONFIG_FILE
    fields: Any = None
    for part in (config, config.get("text_config")):
        for key in QUANTIZATION_KEYS:
            if not fields and isinstance(part, dict):
                fields = part.get(key)
    if not fields and (folder / GPTQ_FILE).is_file():
        file = folder / GPTQ_FILE
        fields = _gptq_settings(file)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise ModelError(f"{file}: {QUANTIZATION_KEY} is not an object", help=FLOAT_FOLDER_HELP)
    settings = MethodSettings(file, fields)
    if settings.method not in READERS:
        raise ModelError(
            f"{folder} is quantized by {settings.method}, which quantizer cannot dequantize",
            help=f"{FLOAT_FOLDER_HELP}, or one that is quantized by {listed(READERS)}",
        )
    return partial(_dequantized, folder, settings)


def _gptq_settings(file: Path) -> JsonMapping | None:
    """Return the settings in a file of AutoGPTQ, or None if it is another file of this name.

    Raises:
        ModelError: it cannot be read.
    """
    fields = read_object(file, ModelError)
    if "bits" not in fields:
        return None
    return {"quant_method": "gptq"} | fields


def _dequantized(
    folder: Path,
    settings: MethodSettings,
    stored: Mapping[str, DeferredTensor],
    dtype: torch.dtype,
) -> tuple[dict[str, DeferredTensor], str]:
    """Return the float tensors of a folder by name, and a sentence on what was done.

    Args:
        folder: of the model.
        settings: how it is quantized.
        stored: its tensors by name.
        dtype: of the dequantized weights.

    Raises:
        ModelError: tensors do not fit each other or the settings.
    """
    reader = READERS[settings.method](settings, dtype)
    tensors: dict[str, DeferredTensor] = {}
    ignored: set[str] = set()
    count = 0
    for layer in split_into_layers(stored):
        dequantized = reader.read(layer)
        used = () if dequantized is None else dequantized.used
        for part, tensor in layer.parts.items():
            if part in used:
                continue
            if _is_ignored(part):
                ignored.add(part)
            elif tensor.dtype in FLOAT8_DTYPES:
                raise layer.damage(part, "has fp8 numbers that no scale belongs to")
            else:
                tensors[layer.full_name(part)] = tensor
        if dequantized is not None:
            for part, weight in dequantized.weights.items():
                tensors[layer.full_name(part)] = weight
                count += 1
    if not count:
        raise ModelError(
            f"{settings.file} says that the weights are quantized by {settings.method}, and "
            f"{folder} has no such tensors",
            help="give the config.json that was saved with these weights",
        )
    remark = (
        f"{folder} is quantized by {settings.method}: {counted(count, 'tensor')} dequantized, "
        "and the dequantized model is the float model here"
    )
    if ignored:
        remark += f"; {listed(sorted(ignored))} of inputs and caches are ignored"
    return tensors, remark


def _is_ignored(part: str) -> bool:
    """Return whether a tensor describes how inputs or a KV cache are quantized.

    >>> _is_ignored("input_scale"), _is_ignored("k_scale"), _is_ignored("weight_scale")
    (True, True, False)
    """
    stem, _, ending = part.partition("_")
    return stem in _IGNORED_STEMS and ending in _IGNORED_ENDINGS
