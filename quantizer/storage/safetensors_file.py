"""Read safetensors files into memory or as deferred tensors, and write them."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor, bytes_of, read_tensor
from quantizer.storage.opened_files import OpenFile
from quantizer.storage.system_calls import BytesInFile

DTYPES_BY_NAME: dict[str, torch.dtype] = {
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
"""The dtypes of safetensors files, by the names that the format gives them."""

_NAMES_BY_DTYPE = {dtype: name for name, dtype in DTYPES_BY_NAME.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000
"""The limit of the library safetensors, in bytes."""


def deferred_file(path: Path | OpenFile) -> dict[str, DeferredTensor]:
    """Return the tensors of a safetensors file. Each is read when it is needed.

    A memory map would be simpler, but the whole file would count against `ulimit -v` at once.
    The file stays open, so the tensors keep their values if the file is replaced.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is not a safetensors file, or it is truncated.
    """
    file = OpenFile.open(path) if isinstance(path, Path) else path
    header, data_start = _read_header(file)
    header.pop(_METADATA, None)
    tensors: dict[str, DeferredTensor] = {}
    end = 0
    try:
        # The data of the tensors must be adjacent: the format allows no gaps and no overlaps
        for name in sorted(header, key=lambda name: (*header[name]["data_offsets"], name)):
            fields = header[name]
            begin = end
            shape = torch.Size(fields["shape"])
            dtype = DTYPES_BY_NAME[str(fields["dtype"])]
            end += shape.numel() * dtype.itemsize
            is_sound = fields["data_offsets"] == [begin, end] and min(shape, default=0) >= 0
            if not is_sound or data_start + end > file.size:
                raise SafetensorError(f"{name} is not where its header says")
            tensors[name] = _deferred(file, data_start + begin, shape, dtype)
    except (ValueError, KeyError, TypeError) as error:
        raise SafetensorError(f"its header is damaged: {error}") from error
    return tensors


def _deferred(
    file: OpenFile, start: int, shape: torch.Size, dtype: torch.dtype
) -> DeferredTensor:
    def load() -> Tensor:
        return read_tensor(file.descriptor, start, shape, dtype)

    place = BytesInFile(file, start, shape.numel() * dtype.itemsize)
    return DeferredTensor(shape, dtype, load, place=place)


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata of a file: texts by name.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is not a safetensors file, or it is truncated.
    """
    header, _ = _read_header(OpenFile.open(path))
    return header.get(_METADATA) or {}


def _read_header(file: OpenFile) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and the position where the data begin.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: there is no header, or it is damaged.
    """
    # The file begins with the length of the header in 8 bytes
    length = int.from_bytes(file.read(8, 0), "little")
    if not 2 <= length <= file.size - 8:
        raise SafetensorError("the length of its header is beyond its end")
    if length > _LONGEST_HEADER:
        raise SafetensorError(f"its header is longer than {_LONGEST_HEADER} bytes")
    try:
        header = json.loads(file.read(length, 8))
    except (ValueError, RecursionError) as error:
        raise SafetensorError(f"its header is damaged: {error}") from error
    if not isinstance(header, dict):
        raise SafetensorError("its header is damaged: it is not an object")
    return header, 8 + length


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, all in memory.

    Raises:
        OSError: the file cannot be read.
        SafetensorError: it is not a safetensors file, or it is damaged.
    """
    # The library cannot open a file whose name is not UTF-8, but it can parse its bytes
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return load(path.read_bytes())
    return load_file(path)


def safetensors_parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes]:
    """Yield the parts of a safetensors file: the header in JSON, then the values of each
    tensor.

    The library can only write tensors that are all in memory. Here one deferred tensor is
    loaded at a time. The widest dtypes come first, so that all values are aligned.

    Source: the description of the format in the README of safetensors.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = dict(sorted(metadata.items()))
    end = 0
    for name in names:
        tensor = tensors[name]
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _NAMES_BY_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The data begin at a multiple of 8
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield bytes_of(tensors[name])
