"""Write tensors to one safetensors file, or to several of limited size (shards) with an index,
and read them. Files are named as transformers names them.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import deferred_tensors, write_json, write_tensors
from quantizer.storage.opened_files import OpenedFiles

MAX_SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in one file. A larger tensor has a file of its own."""


def write_shards(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write tensors to `path`, or to shards and an index if they exceed `MAX_SHARD_BYTES`.

    Returns:
        The sha256 of each file, by its name.

    Raises:
        ResultError: the folder cannot be written or the disk is full.
    """
    shards = _split(tensors)
    if len(shards) == 1:
        digest = write_tensors(path, tensors, metadata)
        return {path.name: digest}
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(path.name, number, len(shards))
        shard_path = path.with_name(name)
        digests[name] = write_tensors(shard_path, shard, metadata)
        weight_map |= dict.fromkeys(shard, name)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    index_path = path.with_name(_index_name(path.name))
    digests[index_path.name] = write_json(index_path, index)
    return digests


def tensor_files_and_index(name: str, files: Iterable[str]) -> list[str]:
    """Return the names among `files` of the file `name` and of its shards.

    The name of their index follows, whether there is one or not.
    """
    shards = tensor_files_of(name, files)
    return [*shards, _index_name(name)]


def deferred_shards(name: str, opened: OpenedFiles) -> dict[str, DeferredTensor]:
    """Return the tensors that `write_shards` wrote for `name`. Each is read when it is needed.

    Raises:
        ResultError: a file is damaged.
    """
    tensors: dict[str, DeferredTensor] = {}
    for shard in tensor_files_of(name, opened.names):
        tensors |= deferred_tensors(opened[shard])
    return tensors


def shard_name(name: str, number: int, count: int) -> str:
    """Return the name of one of `count` shards of `name`, numbered from 1.

    >>> shard_name("weights.safetensors", 1, 12)
    'weights-00001-of-00012.safetensors'
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number:05}-of-{count:05}.{suffix}"


def tensor_files_of(name: str, files: Iterable[str]) -> list[str]:
    """Return the names among `files` of the file `name` and of its shards, sorted.

    >>> tensor_files_of(
    ...     "a.safetensors",
    ...     ["a-00002-of-00002.safetensors", "a-00001-of-00002.safetensors", "b.safetensors"],
    ... )
    ['a-00001-of-00002.safetensors', 'a-00002-of-00002.safetensors']
    """
    stem, _, suffix = name.rpartition(".")
    before = re.escape(stem)
    after = re.escape(f".{suffix}")
    pattern = re.compile(before + r"(-\d{5}-of-\d{5})?" + after)
    return sorted(filter(pattern.fullmatch, files))


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Distribute tensors over shards, in the order of their names."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    return shards


def _index_name(name: str) -> str:
    """Return the name of the index of the shards of `name`."""
    return f"{name}.index.json"
