"""Make all calls of transformers that read a folder: local files only, and no code of the
folder unless it is trusted.

Without `trust_remote_code=False`, transformers asks on the terminal whether to run code.
"""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantizer.errors import ModelError

_KERNELS = ("attn_implementation", "_attn_implementation")
"""Keys of config.json that may name compiled code on the hub, as `OWNER/NAME`."""
_COUNTS: Mapping[str, int] = {
    "layers": 10_000,
    "layer": 10_000,
    "depth": 10_000,
    "blocks": 10_000,
    "experts": 10_000,
    "labels": 1_000_000,
}
"""The most parts that a config may ask for, by the last word of a key. transformers makes them
one by one.
"""
_TRUST_HELP = "read its Python files, and add <--trust> to run them"


def load_pretrained(
    kind: Any, folder: Path | None, *, trust: bool = False, **settings: Any
) -> Any:
    """Return what `from_pretrained` of a class reads. Errors are those of transformers.

    Args:
        kind: the class, or its name in transformers.
        folder: what is read; None if `settings` have it all.
        trust: whether code of the folder may run.
        settings: more arguments of `from_pretrained`.
    """
    if isinstance(kind, str):
        kind = getattr(importlib.import_module("transformers"), kind)
    return kind.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust, **settings
    )


def model_class(architecture: str, config: Any, folder: Path, *, trust: bool) -> Any:
    """Return the class of a model; an Auto class stands for the one that it finds.

    Args:
        architecture: its name in transformers.
        config: of transformers.
        folder: of the model.
        trust: whether the class may be code of the folder.

    Raises:
        ModelError: it is code of the folder, which is not trusted.
    """
    model = getattr(importlib.import_module("transformers"), architecture)
    if hasattr(model, "_from_config"):
        return model
    places = getattr(config, "auto_map", None) or {}
    if architecture not in places:
        return model._model_mapping[type(config)]
    if not trust:
        raise ModelError(
            f"{folder} is not loaded: {places[architecture]} is code in this folder",
            help=_TRUST_HELP,
        )
    modules = importlib.import_module("transformers.dynamic_module_utils")
    return modules.get_class_from_dynamic_module(
        places[architecture], folder, local_files_only=True
    )


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Check that a config names no kernel on the hub, and that it asks for no more parts than a
    model has. transformers would download the kernel and run it.

    Args:
        file: the config.json.
        config: its values.

    Raises:
        ModelError: it does; the kernel or the key is named.
    """
    for key, count in _large_counts(config):
        raise ModelError(
            f"{file} asks for {key} {count}, more than a model has",
            help="give the config.json that was saved with these weights",
        )
    for name in _kernels(config):
        raise ModelError(
            f"{file} names the kernel {name!r:.200}, which is code on the hub",
            help="remove attn_implementation from it, or add <--trust> to run that code",
        )


def _large_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the keys of a config and of configs in it whose counts are too large."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _large_counts(value)
        most = _COUNTS.get(key.rpartition("_")[2])
        if most is not None and isinstance(value, int) and value > most:
            yield key, value


def _kernels(config: Mapping[str, Any], is_kernel: bool = False) -> Iterator[str]:
    """Yield the kernels that a config or a config in it names. Each part of a model may have
    its own.
    """
    for key, value in config.items():
        names_kernel = is_kernel or key in _KERNELS
        if isinstance(value, dict):
            yield from _kernels(value, names_kernel)
        elif names_kernel and "/" in str(value):
            yield str(value)
