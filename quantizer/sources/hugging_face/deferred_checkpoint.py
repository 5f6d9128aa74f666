"""The tensors of a Hugging Face folder. Build a model whose weights stay in their files until
they are computed with. Keep what the class of the model does not use.

Unused tensors of whole layers are carried through unchanged. Those that would change the result
of a layer are refused.
"""

import importlib
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.json_types import JsonMapping, fits
from quantizer.config.wording import counted, first_names, listed
from quantizer.errors import ModelError
from quantizer.graph.tracing.parameters import replace_parameters
from quantizer.plugins import part
from quantizer.sources.json_files import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    FLOAT_FOLDER_HELP,
    QUANTIZATION_KEYS,
    load_pretrained,
    read_object,
    require_inside,
)
from quantizer.sources.tensor_files import read_deferred
from quantizer.sources.tensor_kinds import dtype_name
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.process_memory import tune_for_large_tensors

CHECKPOINT_INDEX = "model.safetensors.index.json"
Dequantize = Callable[
    [Mapping[str, DeferredTensor], torch.dtype], tuple[dict[str, DeferredTensor], str]
]
"""Returns the float tensors of stored ones, and a sentence on what was done."""


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
        ModelError: a file is elsewhere, an index is damaged, or it does not name a file.
    """
    config = read_object(folder / CONFIG_FILE, ModelError)
    explicit = str(config.get("transformers_weights") or "")
    require_inside(folder / CONFIG_FILE, explicit)
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


_logger = logging.getLogger(__name__)

_UNUSED = "unused_tensors"
"""The attribute of a model that has its carried tensors."""
_LORA = "lora_"
"""What names of the matrices of LoRA contain."""
_COMPUTED = ("inv_freq", "masked_bias", "position_ids")
"""Tensors that earlier versions of transformers stored, and compute today."""
_MASKS = (torch.bool, torch.uint8)
_CHANGE_HELP = (
    "name the class that was saved in config.json; a LoRA is merged by merge_and_unload() of "
    "peft; codes need their quantization_config"
)


def keep_unused_tensors(
    folder: Path, module: nn.Module, stored: Mapping[str, Tensor], unexpected: Collection[str]
) -> None:
    """Keep what a model does not use of its folder for the checkpoints that are written, and
    name it.

    Args:
        folder: of the model.
        module: the model.
        stored: the tensors of the folder, by name.
        unexpected: names for which transformers found no place.

    Raises:
        ModelError: a tensor belongs to a layer that runs without it, or holds codes.
    """
    architecture = type(module).__name__
    ignored = _ignored_names(module, stored)
    unused = {*unexpected, *ignored}
    kept = [name for name in sorted(unused) if not _is_computed(module, stored, name)]
    changing: list[str] = []
    for name in kept:
        is_beside = name in ignored or not _belongs_to_layer(module, name)
        if name not in stored or not is_beside:
            changing.append(name)
    _require_no_codes(folder, module, stored, unused)
    if changing:
        tensors = counted(len(changing), "tensor")
        raise ModelError(
            f"{folder} has {tensors} that {architecture} lacks, in layers that it runs: "
            f"{first_names(changing)}",
            help=_CHANGE_HELP,
        )
    vars(module)[_UNUSED] = {name: stored[name] for name in kept}
    if kept:
        tensors = counted(len(kept), "tensor")
        _logger.warning(
            "%s does not use %s of %s; checkpoint folders keep them unchanged, and other files "
            "have no place for them: %s",
            architecture,
            tensors,
            folder,
            first_names(kept),
        )


def unused_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's folder that the model does not use, by name.

    Raises:
        ModelError: the folder has changed, and cannot be read.
    """
    kept: dict[str, Tensor] | None = vars(module).get(_UNUSED)
    if kept is not None:
        return kept
    # A model that transformers has loaded
    folder = Path(str(getattr(module, "name_or_path", "")))
    config = folder / CONFIG_FILE
    if not folder.name or not config.is_file():
        return {}
    if dequantizer_of(folder, read_object(config, ModelError)) is not None:
        return {}
    stored = stored_tensors(folder)
    names = _ignored_names(module, stored)
    return {name: stored[name] for name in names if not _is_computed(module, stored, name)}


def _ignored_names(module: nn.Module, stored: Mapping[str, Tensor]) -> list[str]:
    """Return the names that the class of a model has transformers pass over."""
    patterns: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    if not patterns:
        return []
    ignored = re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)))
    state = module.state_dict()
    return [name for name in stored if name not in state and ignored.search(name)]


def _is_computed(module: nn.Module, stored: Mapping[str, Tensor], name: str) -> bool:
    """Return whether a model computes the values of a stored tensor itself: a buffer or a
    mask.
    """
    if name.endswith(_COMPUTED) or name in dict(module.named_buffers()):
        return True
    return name in stored and stored[name].dtype in _MASKS


def _belongs_to_layer(module: nn.Module, name: str) -> bool:
    """Return whether a name is that of a tensor of a module that a model has, or of a part of a
    layer with weights.
    """
    if _LORA in name:
        return True
    part: nn.Module = module
    path = name.split(".")
    for index, key in enumerate(path):
        child = part._modules.get(key)
        if child is None:
            is_tensor_of_part = index == len(path) - 1
            return is_tensor_of_part or any(True for _ in part.parameters(recurse=False))
        part = child
    return True


def _require_no_codes(
    folder: Path, module: nn.Module, stored: Mapping[str, Tensor], unused: Collection[str]
) -> None:
    """Check that no weight of a float model is stored as codes.

    Raises:
        ModelError: some are, and nothing in the folder says by which method.
    """
    last_parts = {
        path.rpartition(".")[2]
        for path, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }
    codes: dict[str, str] = {}
    for name, tensor in stored.items():
        is_weight = name.rpartition(".")[2] in last_parts and name not in unused
        is_float = tensor.is_floating_point() and tensor.element_size() > 1
        if is_weight and not is_float:
            codes[name] = dtype_name(tensor.dtype)
    if codes:
        weights = counted(len(codes), "weight")
        kinds = listed(sorted({*codes.values()}))
        raise ModelError(
            f"{folder} stores {weights} as codes ({kinds}), and config.json "
            f"has no quantization_config: {first_names([*codes])}",
            help=FLOAT_FOLDER_HELP,
        )
