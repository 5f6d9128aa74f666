"""A folder as `save_pretrained` of transformers makes it: config.json, shards, tokenizer. Knows
no quantization.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quantizer.config.wording import a_kind
from quantizer.errors import UsageError
from quantizer.sources.deferred_checkpoint import WEIGHTS
from quantizer.sources.hugging_face import CONFIG
from quantizer.storage.files import read_json, write_json
from quantizer.storage.tensor_shards import write_shards

QUANTIZATION = "quantization_config"
BESIDE = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *(
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
    ),
    *("preprocessor_config.json", "processor_config.json", "generation_config.json"),
)
"""The files that are copied: no code, and no weights."""


def source_of(model: nn.Module) -> Path | None:
    """The folder that transformers read a model from, if it is still there."""
    name = getattr(model, "name_or_path", None)
    folder = Path(name) if isinstance(name, str) and name else None
    return folder if folder is not None and (folder / CONFIG).is_file() else None


def described(model: nn.Module) -> dict[str, Any]:
    """The model's config.json, as it was read, or as its `config` writes it; without a
    quantization of before.

    Raises:
        UsageError: the model has no config of transformers.
    """
    folder, config = source_of(model), getattr(model, "config", object())
    if folder is not None:
        found = read_json(folder / CONFIG)
    elif hasattr(config, "to_json_string"):
        found = json.loads(config.to_json_string())
    else:
        raise UsageError(
            f"the model is {a_kind(model)} without a config of transformers, so no engine "
            "could load its checkpoint",
            help="use --deploy safetensors, onnx or pt2, or give a Hugging Face folder",
        )
    found = {key: value for key, value in found.items() if key != QUANTIZATION}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    spelled = "torch_dtype" if "torch_dtype" in found else "dtype"
    return found | {"architectures": [type(model).__name__], spelled: dtype}


def write_folder(
    folder: Path,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any],
) -> list[str]:
    """Write the files of a checkpoint.

    Args:
        model: the float model, whose config.json, tokenizer and generation settings it gets.
        tensors: by name.
        quantization: the field `quantization_config`.

    Returns:
        What the user should hear.

    Raises:
        UsageError: the model has no config of transformers.
        ResultError: the folder cannot be written.
    """
    write_json(folder / CONFIG, described(model) | {QUANTIZATION: quantization})
    write_shards(folder / WEIGHTS, tensors, {"format": "pt"})
    source = source_of(model)
    if source is not None:
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    settings = getattr(model, "generation_config", None)
    if settings is not None and not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", json.loads(settings.to_json_string()))
    return [] if source else ["no tokenizer is copied: the model does not come from a folder"]
