"""Tensors in one safetensors file or in several of bounded size, named and indexed as
transformers does it.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import deferred_tensors, write_json, write_tensors
from quantizer.storage.opened_files import OpenedFiles

SHARD = 5 * 10**9
"""Bytes of a shard at most; a tensor is never cut."""


def write_shards(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write `path`, or where that would be larger than `SHARD`, its shards and an index; each
    tensor by tensor.

    Returns:
        The sha256 of each file, by its name.

    Raises:
        ResultError: the folder cannot be written or the disk is full.
    """
    parts = list(_cut(tensors))
    if len(parts) < 2:
        return {path.name: write_tensors(path, tensors, metadata)}
    names = [shard_name(path.name, number, len(parts)) for number in range(1, len(parts) + 1)]
    shards = dict(zip(names, parts, strict=True))
    files = {
        name: write_tensors(path.with_name(name), own, metadata) for name, own in shards.items()
    }
    index = {
        "metadata": {"total_size": sum(map(_size, tensors.values()))},
        "weight_map": {tensor: name for name, own in shards.items() for tensor in own},
    }
    return files | {_index(path).name: write_json(_index(path), index)}


def left_files(path: Path) -> list[str]:
    """The names of all files that `write_shards` may have left of `path`."""
    shards = shards_of(
        path.name, (each.name for each in path.parent.glob("*-of-*.safetensors"))
    )
    return [path.name, *shards, _index(path).name]


def shard_files(name: str, files: Collection[str]) -> list[str]:
    """Those of `files` that `write_shards` wrote of the tensors of `name`."""
    index = _index(Path(name)).name
    return [*shards_of(name, files), *(file for file in files if file == index)]


def deferred_shards(name: str, opened: OpenedFiles) -> dict[str, DeferredTensor]:
    """What `write_shards` wrote to a file of this name, each tensor read when it is needed.

    Raises:
        ResultError: a file is damaged.
    """
    tensors: dict[str, DeferredTensor] = {}
    for shard in shards_of(name, opened.names):
        tensors |= deferred_tensors(opened[shard])
    return tensors


def _index(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.json")


def _cut(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """In the order of their names."""
    part, filled = dict[str, Tensor](), 0
    for name, tensor in sorted(tensors.items()):
        if part and filled + _size(tensor) > SHARD:
            yield part
            part, filled = {}, 0
        part[name] = tensor
        filled += _size(tensor)
    if part:
        yield part


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
