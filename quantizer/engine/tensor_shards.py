"""Tensors in one safetensors file or in several of bounded size, named and indexed as
transformers does it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from quantizer.engine.result_files import deferred_tensors, write_json, write_tensors
from quantizer.nn.stored import shard_name, shards_of
from quantizer.numerics.deferred import DeferredTensor
from quantizer.opened_files import OpenedFiles

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
