"""Safetensors files as their library reads them, wherever they lie."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load, load_file
from torch import Tensor


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; the library opens none whose name is not UTF-8, so that of such a
    one it gets the bytes.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is none, or damaged.
    """
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return load(path.read_bytes())
    return load_file(path)


def shard_name(name: str, number: int, count: int) -> str:
    """What a part of the tensors of `name` is called, as transformers does it.

    >>> shard_name("weights.safetensors", 1, 12)
    'weights-00001-of-00012.safetensors'
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number:05}-of-{count:05}.{suffix}"


def shards_of(name: str, files: Iterable[str]) -> list[str]:
    """Those of `files` that hold the tensors of `name`: itself, its shards in their order, or
    none.

    >>> shards_of(
    ...     "a.safetensors",
    ...     ["a-00002-of-00002.safetensors", "a-00001-of-00002.safetensors", "b.safetensors"],
    ... )
    ['a-00001-of-00002.safetensors', 'a-00002-of-00002.safetensors']
    """
    stem, _, suffix = map(re.escape, name.rpartition("."))
    return sorted(
        file for file in files if re.fullmatch(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}", file)
    )
