"""A safetensors file as deferred tensors, each in memory for as long as it is computed with."""

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor, bytes_of, read_tensor
from quantizer.storage.opened_files import OpenFile

STORED: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes of safetensors files by their names there."""

_NAMES = {dtype: name for name, dtype in STORED.items()}


def deferred_file(path: Path | OpenFile) -> dict[str, DeferredTensor]:
    """The tensors of a safetensors file, each read when it is needed, and no more of the file
    than that: a map of all of it would count as memory, against `ulimit -v` at once. The file
    stays open, so another one that takes its place changes nothing.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is none, or truncated.
        KeyError: it has a dtype that torch has not.
    """
    file = OpenFile.at(path) if isinstance(path, Path) else path
    header, length, size = _header(file)
    try:
        rows = [
            (*_span(row), name, str(row["dtype"]))
            for name, row in header.items()
            if name != _METADATA
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SafetensorError(f"its header is damaged: {error}") from error
    found, end = {}, 0
    for begin, stop, shape, name, stored in sorted(rows):
        dtype = STORED[stored]
        if (
            begin != end
            or stop - begin != shape.numel() * dtype.itemsize
            or 8 + length + stop > size
        ):
            raise SafetensorError(f"{name} is not where its header says")
        end = stop
        found[name] = DeferredTensor(
            shape, dtype, partial(_read, file, 8 + length + begin, shape, dtype)
        )
    return found


def metadata(path: Path) -> Mapping[str, str]:
    """The texts that a file holds beside its tensors.

    Raises:
        OSError: it cannot be read.
        SafetensorError: it is none, or truncated.
    """
    found: Mapping[str, str] = _header(OpenFile.at(path))[0].get(_METADATA) or {}
    return found


_METADATA = "__metadata__"


def _header(file: OpenFile) -> tuple[dict[str, Any], int, int]:
    """A file's header, its length, and that of the file."""
    size = file.size
    length = int.from_bytes(file.read(8, 0), "little")
    if not 2 <= length <= size - 8:
        raise SafetensorError("the length of its header is beyond its end")
    try:
        header = json.loads(file.read(length, 8))
    except ValueError as error:
        raise SafetensorError(f"its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise SafetensorError("its header is damaged: it is no object")
    return header, length, size


def _span(row: Mapping[str, Any]) -> tuple[int, int, torch.Size]:
    """Where a tensor begins and ends, and its shape."""
    begin, stop = map(int, row["data_offsets"])
    if any(size < 0 for size in row["shape"]):
        raise ValueError(f"there is no shape {row['shape']}")
    return begin, stop, torch.Size(row["shape"])


def _read(file: OpenFile, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return read_tensor(file.descriptor, start, shape, dtype)


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


def safetensors_parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes]:
    """Yield the parts of a file: a header of JSON, then the values.

    The widest values come first, so that all are aligned.

    Source: the format's description in the README of safetensors, which itself writes only what
    is all in memory.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = (
        {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    )
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield bytes_of(tensors[name])
