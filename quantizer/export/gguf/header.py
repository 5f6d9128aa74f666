"""Checks the header of a GGUF file before the package gguf reads it.

Refuses counts and lengths that the file cannot hold, or that would take forever.

Source: the format's description, docs/gguf.md of ggml.
"""

import math
import mmap
import os
import struct
from pathlib import Path

import gguf

from quantizer.storage.system_calls import require_file_or_folder

# Of all lists. The package reads elements one by one. A large vocabulary has a million.
MAX_ELEMENTS = 4_000_000
# As in ggml.
MAX_DIMENSIONS = 4
_FORMATS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.BOOL: "B",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}


def check_header(path: Path) -> None:
    """Read the header once, at a cost that its length bounds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a GGUF file, or its header exceeds the file or the limits.
    """
    require_file_or_folder(path)
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).check()


class _Header:
    """A cursor that moves over the header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._position = 0
        self._elements = 0
        self._byte_order = "<"

    def check(self) -> None:
        """Read the whole header."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        # The package recognizes the other byte order by a version that is far too large.
        if version & 0xFFFF == 0:
            self._byte_order = ">"
        tensors = self._number("Q")
        keys = self._number("Q")
        for _ in range(keys):
            self._text()
            self._value(self._kind())
        for _ in range(tensors):
            self._tensor()

    def _tensor(self) -> None:
        name = self._text()
        count = self._number("I")
        if count > MAX_DIMENSIONS:
            raise ValueError(
                f"the tensor {name!r} has {count} dimensions, more than {MAX_DIMENSIONS}"
            )
        sizes = [self._number("Q") for _ in range(count)]
        kind = gguf.GGMLQuantizationType(self._number("I"))
        start = self._number("Q")
        block, width = gguf.GGML_QUANT_SIZES[kind]
        length = math.prod(sizes) * width // block
        if start + length > len(self._content):
            raise ValueError(f"the tensor {name!r} goes beyond the end of the file")

    def _value(self, kind: gguf.GGUFValueType, count: int = 1) -> None:
        """Skip so many values of a kind."""
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                self._bytes(self._number("Q"))
        elif kind == gguf.GGUFValueType.ARRAY:
            self._list()
        else:
            self._move(count * struct.calcsize(_FORMATS[kind]))

    def _list(self) -> None:
        kind = self._kind()
        count = self._number("Q")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise ValueError(
                f"its lists have {self._elements} elements, more than {MAX_ELEMENTS}"
            )
        if kind == gguf.GGUFValueType.ARRAY:
            raise ValueError("it has a list of lists")
        self._value(kind, count)

    def _kind(self) -> gguf.GGUFValueType:
        return gguf.GGUFValueType(self._number("I"))

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(self._byte_order + form, self._bytes(struct.calcsize(form)))
        return int(number)

    def _bytes(self, count: int) -> bytes:
        start = self._position
        self._move(count)
        return self._content[start : self._position]

    def _move(self, count: int) -> None:
        if count > len(self._content) - self._position:
            raise ValueError("it is truncated, or a length in it is wrong")
        self._position += count
