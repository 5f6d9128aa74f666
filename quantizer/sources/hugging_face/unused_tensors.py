"""Tensors of a Hugging Face folder that the class of its model does not use.

Those of whole layers are carried through unchanged. Those that would change the result of a
layer are refused.
"""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import counted, first_names, listed
from quantizer.errors import ModelError
from quantizer.sources.files.json_files import read_object
from quantizer.sources.files.transformers_folder import CONFIG_FILE, FLOAT_FOLDER_HELP
from quantizer.sources.hugging_face.deferred_checkpoint import dequantizer_of, stored_tensors
from quantizer.sources.tensor_kinds import dtype_name

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
