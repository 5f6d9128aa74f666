"""Build a Hugging Face model whose weights stay in their files until they are computed with."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.config.json_types import JsonMapping
from quantizer.config.typed_fields import fits
from quantizer.config.wording import first_names
from quantizer.errors import ModelError
from quantizer.graph.tracing.parameters import replace_parameters
from quantizer.plugins import part
from quantizer.sources.files.json_files import read_object
from quantizer.sources.files.tensor_files import read_deferred
from quantizer.sources.files.transformers_folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    FLOAT_FOLDER_HELP,
    QUANTIZATION_KEYS,
    load_pretrained,
    require_inside,
)
from quantizer.storage.allocator import tune_for_large_tensors
from quantizer.storage.deferred_tensor import DeferredTensor

CHECKPOINT_INDEX = "model.safetensors.index.json"
Dequantize = Callable[
    [Mapping[str, DeferredTensor], torch.dtype], tuple[dict[str, DeferredTensor], str]
]
"""Returns the float tensors of stored ones, and a sentence on what was done."""


def deferred_model(folder: Path, architecture: str) -> nn.Module | None:
    """Return the model that `from_pretrained` would build, with deferred parameters.

    Return None if the files have other names, shapes or dtypes than the model. Then
    `from_pretrained` renames, fuses or converts weights.

    Raises:
        Exception: of transformers and safetensors, as `from_pretrained` would.
    """
    stored = stored_tensors(folder)
    config = load_pretrained("AutoConfig", folder)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized or not stored:
        return None
    return filled_model(folder, config, architecture, stored)


def filled_model(
    folder: Path, config: Any, architecture: str, stored: dict[str, DeferredTensor]
) -> nn.Module | None:
    """Return the model of a config with deferred parameters, or None if they do not fit.

    Args:
        folder: of the model.
        config: of transformers.
        architecture: the class of the model in transformers.
        stored: the parameters by name.

    Raises:
        Exception: of transformers, as `from_pretrained` would.
    """
    transformers = importlib.import_module("transformers")
    accelerate = importlib.import_module("accelerate")
    model = getattr(transformers, architecture)
    # Auto classes have no such method
    if not hasattr(model, "_from_config"):
        return None
    dtype = config.dtype or next(iter(stored.values())).dtype
    with accelerate.init_empty_weights(include_buffers=False):
        module: nn.Module = model._from_config(config, dtype=dtype)
    # Building the model on the meta device has untied its weights
    module.tie_weights()  # type: ignore[operator]
    if not _fits(module, stored):
        return None
    tune_for_large_tensors(sum(tensor.nbytes for tensor in stored.values()))
    replace_parameters(module, {name: stored[name] for name, _ in module.named_parameters()})
    read_generation_settings(module, folder)
    return module


def read_generation_settings(module: nn.Module, folder: Path) -> None:
    """Give a model the generation settings of its folder, if there are any."""
    if (folder / "generation_config.json").is_file():
        module.generation_config = load_pretrained("GenerationConfig", folder)


def stored_tensors(folder: Path) -> dict[str, DeferredTensor]:
    """Return the tensors of the folder's safetensors files by name.

    Raises:
        ModelError: a file is missing or damaged, a file of another folder is named, or there
            are the weights of two models.
    """
    tensors: dict[str, DeferredTensor] = {}
    for name in _weight_files(folder):
        tensors |= read_deferred(folder / name, ModelError)
    return tensors


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the folder's safetensors files.

    Raises:
        ModelError: an index is damaged, or there is a file that it does not name.
    """
    config = read_object(folder / CONFIG_FILE, ModelError)
    explicit = str(config.get("transformers_weights") or "")
    if explicit.endswith(".index.json"):
        return indexed_files(folder / explicit)
    if explicit:
        return [explicit]
    single = [CHECKPOINT_FILE] if (folder / CHECKPOINT_FILE).is_file() else []
    if not (folder / CHECKPOINT_INDEX).exists():
        return single
    indexed = indexed_files(folder / CHECKPOINT_INDEX)
    if single and indexed != single:
        raise ModelError(
            f"{folder} has {CHECKPOINT_FILE} and {CHECKPOINT_INDEX}, which names "
            f"{first_names(indexed)}: it is not known which are the weights of this model",
            help="move the others away",
        )
    return indexed


def indexed_files(index: Path) -> list[str]:
    """Return the names of the weight files in an index, all inside its folder.

    Raises:
        ModelError: a file is elsewhere, or the index is damaged.
    """
    weight_map: Any = read_object(index, ModelError).get("weight_map")
    if not fits(weight_map, dict[str, str]):
        raise ModelError(f"{index} is damaged: its weight_map does not name files")
    files = set(weight_map.values())
    for name in files:
        require_inside(index, name)
    return sorted(files)


def _fits(module: nn.Module, stored: dict[str, DeferredTensor]) -> bool:
    """Return whether the files have exactly the parameters of the module, and no buffers."""
    if any(buffer.is_meta for buffer in module.buffers()):
        return False
    parameters = {name: (row.shape, row.dtype) for name, row in module.named_parameters()}
    return parameters == {name: (row.shape, row.dtype) for name, row in stored.items()}


def dequantizer_of(folder: Path, config: JsonMapping) -> Dequantize | None:
    """Return what dequantizes the weights of a folder, or None if they are float.

    Args:
        folder: of the model.
        config: its config.json.

    Raises:
        ModelError: nothing can dequantize them.
    """
    find = part("dequantize Hugging Face folders")
    if find is not None:
        dequantize: Dequantize | None = find(folder, config)
        return dequantize
    for fields in (config, config.get("text_config") or {}):
        if any(fields.get(key) for key in QUANTIZATION_KEYS):
            raise ModelError(
                f"{folder} is quantized, and no plug-in is there that dequantizes weights",
                help=FLOAT_FOLDER_HELP,
            )
    return None


def stored_dtype(stored: Mapping[str, DeferredTensor]) -> torch.dtype:
    """Return the dtype of the first float tensor that is not a scale, or else float32."""
    for name, tensor in stored.items():
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        if is_float and "scale" not in name:
            return tensor.dtype
    return torch.float32
