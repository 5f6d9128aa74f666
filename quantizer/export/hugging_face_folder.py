"""Writes a folder as `save_pretrained` of transformers does: config.json, shards, and what else
the model came with.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quantizer.config.wording import a_kind
from quantizer.errors import UsageError
from quantizer.export.targets import offered
from quantizer.sources.json_files import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    GPTQ_FILE,
    MODELOPT_FILE,
    QUANTIZATION_KEY,
    QUANTIZATION_KEYS,
    embedding_modules,
)
from quantizer.storage.files import read_json, write_json, write_shards

GENERATION = "generation_config.json"
# Whatever else is in the source is copied.
_WEIGHT_ENDINGS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".pkl",
    ".ot",
    ".tflite",
)
_CODE_ENDINGS = (".py", ".pyc", ".ipynb", ".sh", ".so")
_INDEX_ENDING = ".index.json"
# They describe other weights than those of the new folder.
_REPLACED_FILES = (
    CONFIG_FILE,
    "adapter_config.json",
    MODELOPT_FILE,
    "quant_config.json",
    "recipe.yaml",
    GPTQ_FILE,
)
_TEMPLATE_FOLDER = "additional_chat_templates"


def source_folder(model: nn.Module) -> Path | None:
    """Return the folder that transformers read a model from, if it still exists."""
    name = getattr(model, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    folder = Path(name)
    return folder if (folder / CONFIG_FILE).is_file() else None


def model_config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config.json without an earlier quantization.

    Raises:
        UsageError: the model has no config of transformers.
    """
    folder = source_folder(model)
    config: Any = getattr(model, "config", None)
    if folder is not None:
        content: dict[str, Any] = read_json(folder / CONFIG_FILE)
    elif hasattr(config, "to_json_string"):
        content = json.loads(config.to_json_string())
    else:
        others = offered("weights", "network", "program")
        raise UsageError(
            f"the model is {a_kind(model)} without a config of transformers, so no engine "
            "could load its checkpoint",
            help=f"use {others}, or give a Hugging Face folder",
        )
    for part in (content, content.get("text_config")):
        for key in QUANTIZATION_KEYS:
            if isinstance(part, dict):
                part.pop(key, None)
    # The new folder's weights are where transformers looks first
    content.pop("transformers_weights", None)
    content["architectures"] = [type(model).__name__]
    dtype_key = "torch_dtype" if "torch_dtype" in content else "dtype"
    dtype = next(model.parameters()).dtype
    content[dtype_key] = str(dtype).removeprefix("torch.")
    return content


def write_folder(
    folder: Path,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any],
) -> list[str]:
    """Write the files of a checkpoint.

    Args:
        model: the float model, whose config.json, tokenizer and generation settings are copied.
        tensors: by name.
        quantization: the field `quantization_config`.

    Returns:
        Notes for the user.

    Raises:
        UsageError: the model has no config of transformers.
        ResultError: the folder cannot be written.
    """
    write_json(folder / CONFIG_FILE, model_config(model) | {QUANTIZATION_KEY: quantization})
    write_shards(folder / CHECKPOINT_FILE, tensors, {"format": "pt"})
    source = source_folder(model)
    remarks = ["no tokenizer is copied: the model does not come from a folder"]
    if source is not None:
        remarks = _copy_other_files(source, folder)
    settings = getattr(model, "generation_config", None)
    if settings is not None and not (folder / GENERATION).exists():
        write_json(folder / GENERATION, json.loads(settings.to_json_string()))
    return remarks


def _copy_other_files(source: Path, folder: Path) -> list[str]:
    """Copy what is neither weights nor code: tokenizer, processors, templates, model card; and
    the folders of what Sentence Transformers runs after the model, with their weights.

    Returns:
        A note that names what stays behind, if engines may miss it.
    """
    copied = [module.path for module in embedding_modules(source) if module.path]
    for name in [_TEMPLATE_FOLDER, *copied]:
        if (source / name).is_dir():
            shutil.copytree(
                source / name,
                folder / name,
                ignore=shutil.ignore_patterns(*(f"*{ending}" for ending in _CODE_ENDINGS)),
                copy_function=shutil.copyfile,
                dirs_exist_ok=True,
            )
    missed: list[str] = []
    for path in sorted(source.iterdir()):
        name = path.name
        if name.startswith(".") or name in _REPLACED_FILES or (folder / name).exists():
            continue
        if path.is_dir():
            missed.append(f"{name}/")
        elif name.endswith(_CODE_ENDINGS):
            missed.append(name)
        elif not name.endswith((*_WEIGHT_ENDINGS, _INDEX_ENDING)):
            shutil.copyfile(path, folder / name)
    if not missed:
        return []
    return [f"not copied from {source.name}: {', '.join(missed)}"]
