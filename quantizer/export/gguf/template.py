"""Reads a GGUF file of the same model as a template: keys, names and arrangement of tensors."""

import math
import mmap
import os
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantizer.errors import UsageError
from quantizer.export.gguf.file import (
    FILE_TYPE_KEY,
    Arrangement,
    GgufTensor,
    GgufValue,
    Outline,
)
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


SAME_MODEL_HELP = (
    "give a .gguf of exactly this model, in any type, e.g. what llama.cpp's "
    "convert_hf_to_gguf.py makes of it"
)
# The relative error up to which a tensor of the template is the model's. The coarsest types
# have an error of 0.3, other models' tensors one of 1.4.
_NEAR = 0.5
_ARCHITECTURE_KEY = "general.architecture"
_SPLIT_KEY = "split.count"
# Keys that the writer sets.
_WRITTEN_KEYS = (
    "GGUF.version",
    "GGUF.tensor_count",
    "GGUF.kv_count",
    _ARCHITECTURE_KEY,
    FILE_TYPE_KEY,
)
# What the package gguf raises for a damaged file.
_DAMAGE_ERRORS = (ValueError, TypeError, KeyError, IndexError, OverflowError)


def outline_of_template(
    path: Path, state: Mapping[str, Tensor], first: Mapping[str, str]
) -> Outline:
    """Return what a file takes over from a template.

    The arrangement of a tensor is found by comparison with the float model, so no knowledge of
    architectures is needed.

    Args:
        path: of the template.
        state: the float model's tensors.
        first: the name in `state` of each of the model's tensors, by each of its names.

    Raises:
        UsageError: the template cannot be read, or is of another model.
    """
    reader = _reader(path)
    keys, architecture = _keys(reader, path)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    blocks = _block_count(keys, architecture, len(by_name), path)
    names = file_names(architecture, blocks, first)
    missing = [source for source in state if names.get(source) not in by_name]
    if missing:
        raise _refused(f"{path.name} has no tensor for {missing[0]} of the model")
    sources = {name: first[source] for source, name in names.items() if name in by_name}
    head_counts = _head_counts(keys, architecture)
    arrangements: dict[str, Arrangement] = {}
    # Biases last: they are arranged as the weight of their layer.
    for name in sorted(sources, key=lambda name: name.endswith(".bias")):
        weight_name = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight_name in arrangements:
            arrangements[name] = arrangements[weight_name]
            continue
        source = sources[name]
        what = f"{path.name}: {source}"
        arrangements[name] = _arrangement(by_name[name], state[source], head_counts, what)
    tensors = {name: (sources[name], arrangements[name]) for name in by_name if name in sources}
    constant = {
        name: GgufTensor(tensor.data, tensor.tensor_type.name)
        for name, tensor in by_name.items()
        if name not in sources
    }
    return Outline(architecture, keys, tensors, constant)


def _keys(reader: Any, path: Path) -> tuple[dict[str, GgufValue], str]:
    """Return the keys that another file takes over, and the architecture.

    Raises:
        UsageError: a value cannot be read, there is no architecture, or the file is a part.
    """
    try:
        values = {name: _value(field) for name, field in reader.fields.items()}
    except _DAMAGE_ERRORS as error:
        raise _unreadable(path, error) from None
    architecture = _in(values, _ARCHITECTURE_KEY)
    if not isinstance(architecture, str):
        raise _refused(f"{path} names no architecture: it has no text {_ARCHITECTURE_KEY}")
    keys = {name: value for name, value in values.items() if name not in _WRITTEN_KEYS}
    parts = _in(keys, _SPLIT_KEY, 1)
    if not isinstance(parts, int) or parts > 1:
        raise UsageError(
            f"{path} is one part of several", help="merge them: `llama-gguf-split --merge`"
        )
    return keys, architecture


def _block_count(
    keys: Mapping[str, GgufValue], architecture: str, tensors: int, path: Path
) -> int:
    """Return the number of blocks in the template's keys.

    Raises:
        UsageError: there is none, or the template has fewer tensors than blocks.
    """
    key = f"{architecture}.block_count"
    count = _in(keys, key)
    if not isinstance(count, int) or not 0 <= count <= tensors:
        shown = "nothing" if count is None else f"{count!r:.40}"
        raise _refused(f"{path}: {key} is {shown}, and the file has {tensors} tensors")
    return count


def file_names(architecture: str, blocks: int, sources: Collection[str]) -> dict[str, str]:
    """Return the name in a file of each tensor of the model that the package gguf knows.

    Raises:
        UsageError: the package does not know the architecture.
    """
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in numbers:
        raise UsageError(
            f"the package gguf knows no architecture {architecture}", help="install a newer one"
        )
    table = gguf.get_tensor_name_map(numbers[architecture], blocks)
    names = {source: table.get_name(source, (".weight", ".bias")) for source in sources}
    return {source: name for source, name in names.items() if name is not None}


def _reader(path: Path) -> Any:
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except (OSError, *_DAMAGE_ERRORS) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or error) from None


def _unreadable(path: Path, why: object) -> UsageError:
    return _refused(f"{path} cannot be read as GGUF: {why}")


def _refused(why: str) -> UsageError:
    """Return the error for a file that is not a template of the model."""
    return UsageError(why, help=SAME_MODEL_HELP)


def _in(keys: Mapping[str, GgufValue], name: str, default: Any = None) -> Any:
    """Return the value of a key."""
    return keys[name].value if name in keys else default


def _value(field: Any) -> GgufValue:
    """Return a key as it is written again."""
    element_type = field.types[-1] if len(field.types) > 1 else None
    return GgufValue(field.contents(), field.types[0], element_type)


def _head_counts(keys: Mapping[str, GgufValue], architecture: str) -> list[int]:
    """Return the distinct numbers of heads in the template's keys."""
    key = f"{architecture}.attention.head_count"
    counts = dict.fromkeys([_in(keys, key), _in(keys, f"{key}_kv")])
    return [count for count in counts if isinstance(count, int) and count > 0]


def _arrangement(
    tensor: Any, value: Tensor, head_counts: Sequence[int], what: str
) -> Arrangement:
    """Return the arrangement in which the model's tensor is nearest to the template's.

    Raises:
        UsageError: it is near in none.
    """
    try:
        with warnings.catch_warnings():
            # Values that are not finite are compared, too.
            warnings.simplefilter("ignore")
            decoded = gguf.dequantize(tensor.data, tensor.tensor_type)
    except (*_DAMAGE_ERRORS, NotImplementedError) as error:
        raise _refused(f"{what} cannot be decoded: {error}") from None
    template_value = torch.from_numpy(decoded.astype("float32", copy=True))
    if template_value.shape != value.shape:
        raise _refused(
            f"{what} has the shape {list(template_value.shape)}, in the model "
            f"{list(value.shape)}"
        )
    errors = {
        arrangement: float((arrangement.values(value.float()) - template_value).norm())
        for arrangement in _candidates(value, head_counts)
    }
    best = min(errors, key=lambda arrangement: errors[arrangement])
    # Written so that NaN in the template is not near.
    if not errors[best] <= _NEAR * float(template_value.norm()):
        raise _refused(f"{what} is not the model's")
    return best


def _candidates(value: Tensor, head_counts: Sequence[int]) -> Iterator[Arrangement]:
    yield Arrangement()
    if value.dim() == 1:
        yield Arrangement(added=1.0)
        return
    for heads in head_counts:
        if len(value) % (2 * heads) == 0:
            yield Arrangement(heads=heads)
