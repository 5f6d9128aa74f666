"""Models of a Hugging Face folder, read by transformers from local safetensors alone; no code
of the folder runs that is not trusted.
"""

import importlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import first_names
from quantizer.errors import DataError, ModelError, pip_line
from quantizer.sources.deferred_checkpoint import (
    CHECKPOINT_INDEX,
    deferred_model,
    indexed_files,
    require_inside,
)
from quantizer.sources.text import longest_window
from quantizer.sources.user_code import user_errors

logger = logging.getLogger(__name__)

CONFIG = "config.json"


def load_hugging_face(folder: Path, *, trust: bool = False) -> nn.Module:
    """The model that `config.json` names, in eval mode and in the dtype of its checkpoint,
    without a cache of keys.

    `trust` lets Python files of the folder run, where `auto_map` of its config.json names some.

    Raises:
        ModelError: it cannot be read, lacks weights or needs code that is not trusted, or
            transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{folder} is a Hugging Face model, and transformers is missing",
            help=pip_line("llm"),
        )
    with user_errors(f"transformers, loading {folder},", ModelError):
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        if not isinstance(config, dict):
            raise ModelError(f"{folder / CONFIG} is not a JSON object")
        _require_own_files(folder, config)
        architecture = _class_of(config, folder, trust=trust)
        logger.info("loading %s from %s", architecture, folder)
        module = None if trust else deferred_model(folder, architecture)
        if module is not None:
            return for_windows(module)
        module, report = read_checkpoint(folder, architecture, trust_remote_code=trust)
    if missing := sorted(report["missing_keys"]):
        said = (
            f"{folder} lacks weights of {architecture}, {len(missing)} in all: "
            f"{first_names(missing)}"
        )
        help_ = (
            "they would be drawn at random: save the whole model, or name the class that was "
            "saved in config.json"
        )
        raise ModelError(said, help=help_)
    return module


def _require_own_files(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a folder that names weights outside itself, whoever is to read them.

    Raises:
        ModelError: naming the file that does so.
    """
    explicit = str(config.get("transformers_weights") or "")
    require_inside(folder / CONFIG, explicit)
    indexes = [name for name in (CHECKPOINT_INDEX, explicit) if name.endswith(".index.json")]
    for name in indexes:
        if (folder / name).is_file():
            indexed_files(folder / name)


def _class_of(config: dict[str, Any], folder: Path, *, trust: bool) -> str:
    """The class of transformers that makes the model; with code of the folder, the Auto class
    that knows where it is.

    Raises:
        ModelError: there is none, or it is in code that is not trusted.
    """
    transformers = importlib.import_module("transformers")
    name = str((config.get("architectures") or ["AutoModel"])[0])
    own: dict[str, str] = {
        str(place).rpartition(".")[2]: auto
        for auto, place in (config.get("auto_map") or {}).items()
    }
    if trust and name in own:
        return own[name]
    made = getattr(transformers, name, None)
    if isinstance(made, type) and hasattr(made, "from_pretrained"):
        return name
    if name in own:
        help_ = "read these Python files, and add --trust if you would run them"
        raise ModelError(f"{folder} is not loaded: {name} is code in this folder", help=help_)
    raise ModelError(
        f"{folder / CONFIG} names a model {name!r}, which this version of transformers does "
        "not have"
    )


def read_checkpoint(
    folder: Path, architecture: str, **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """What `from_pretrained` makes of a folder, in eval mode, and what it says of keys that it
    has not found or not used; errors are those of transformers.
    """
    transformers = importlib.import_module("transformers")
    said = transformers.utils.logging
    said.disable_progress_bar()  # it would also draw into a log file
    before = said.get_verbosity()
    said.set_verbosity_error()  # what it would warn of is in the report
    own = {"dtype": "auto", "trust_remote_code": False} | settings
    try:
        module, report = getattr(transformers, architecture).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **own
        )
    finally:
        said.set_verbosity(before)
    return for_windows(module), report


def for_windows(module: nn.Module) -> nn.Module:
    """In eval mode; one call runs a whole window: there are no earlier keys and values, and a
    trace could not keep them.
    """
    for config in _caching(module):
        config.use_cache = False
    return module.eval()


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """While the model is traced: a cache of keys cannot be. Models that have none are left
    alone.
    """
    changed = _caching(module)
    try:
        for config in changed:
            config.use_cache = False
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _caching(module: nn.Module) -> list[Any]:
    """The configs that ask for a cache; a decoder may have one of its own."""
    configs = {
        id(config): config
        for part in module.modules()
        if (config := getattr(part, "config", None)) is not None
    }
    return [
        config for config in configs.values() if getattr(config, "use_cache", False) is True
    ]


def example_input(module: nn.Module, seq_len: int) -> dict[str, Tensor]:
    """An input that has the right shape and says nothing: tokens 0, 1, 2, … or grey pixels, one
    sample.

    `seq_len` tokens, or as many as the model was made for if that is less.

    Raises:
        DataError: the model takes neither tokens nor pixels.
    """
    config: Any = module.config
    name = getattr(module, "main_input_name", "input_ids")
    if name == "input_ids" and isinstance(getattr(config, "vocab_size", None), int):
        ids = (
            torch.arange(min(seq_len, longest_window(module) or seq_len)) % config.vocab_size
        )[None]
        return (
            {name: ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {name: ids}
        )
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        dtype = next(module.parameters()).dtype
        return {
            name: torch.zeros(1, getattr(config, "num_channels", 3), height, width, dtype=dtype)
        }
    raise DataError(
        f"{type(module).__name__} says no shape of its input {name}", help="give --data"
    )
