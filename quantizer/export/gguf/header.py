"""Walks the header of a GGUF file before the package gguf reads it: counts and lengths that the
file cannot hold, or that would take for ever, are refused. Keeps nothing.

Source: the format's description, docs/gguf.md of ggml.
"""

import math
import mmap
import os
import struct
from pathlib import Path

import gguf

from quantizer.storage.plain_files import require_plain

MOST_ELEMENTS = 4_000_000
"""Elements of all lists together. The package reads them one by one; a large vocabulary has a
million.
"""
MOST_DIMENSIONS = 4
"""As ggml has it."""
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
        ValueError: it is no GGUF file, or something in its header goes beyond the file or the
            limits.
    """
    require_plain(path)
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).check()


class _Header:
    """A place in the file that moves on."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._elements = content, 0, 0
        self._order = "<"

    def check(self) -> None:
        """Go through all of it."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        # The package tells files of the other byte order by a version that is far too large.
        if version & 0xFFFF == 0:
            self._order = ">"
        tensors, keys = self._number("Q"), self._number("Q")
        for _ in range(keys):
            self._text()
            self._value(self._kind())
        for _ in range(tensors):
            self._tensor()

    def _tensor(self) -> None:
        name = self._text()
        count = self._number("I")
        if count > MOST_DIMENSIONS:
            raise ValueError(
                f"the tensor {name!r} has {count} dimensions, more than {MOST_DIMENSIONS}"
            )
        sizes = [self._number("Q") for _ in range(count)]
        kind = gguf.GGMLQuantizationType(self._number("I"))
        start = self._number("Q")
        block, width = gguf.GGML_QUANT_SIZES[kind]
        length = math.prod(sizes) * width // block
        if start + length > len(self._content):
            raise ValueError(f"the tensor {name!r} goes beyond the end of the file")

    def _value(self, kind: gguf.GGUFValueType, count: int = 1) -> None:
        """Pass over so many values of a kind."""
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
        if self._elements > MOST_ELEMENTS:
            raise ValueError(
                f"its lists have {self._elements} elements, more than {MOST_ELEMENTS}"
            )
        if kind == gguf.GGUFValueType.ARRAY:
            raise ValueError("it has a list of lists")
        self._value(kind, count)

    def _kind(self) -> gguf.GGUFValueType:
        return gguf.GGUFValueType(self._number("I"))

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(self._order + form, self._bytes(struct.calcsize(form)))
        return int(number)

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._move(count)
        return self._content[start : self._at]

    def _move(self, count: int) -> None:
        if count > len(self._content) - self._at:
            raise ValueError("it is truncated, or a length in it is wrong")
        self._at += count
