"""Describes and writes a GGUF file: keys, and tensors as blocks or as values."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantizer.export.gguf.blocks import block_type, packed_blocks
from quantizer.nn.quantizer import QuantizedTensor

FILE_TYPE_KEY = "general.file_type"
_FILE_TYPES = {"Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}
"""The names of files with one type of blocks, where they have another name."""
_MIXTURES = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""The names of files with layers in Q6_K, too."""
_STACK_RANK = 3
"""The axes of a tensor with a matrix for each expert."""
_LAYERS = 3
"""Query, key and value."""
_ARCHITECTURE_KEY = "general.architecture"
_ALIGNMENT_KEY = "general.alignment"
_WORD = 8
"""The bytes of a count, of a size and of an offset."""
_TYPE = 4
"""The bytes of a type, and of the number of axes."""
_HEADER = 24
"""The bytes before the keys: magic, version, and how many tensors and keys there are."""
_SHORT_TYPES = {"UINT8": 1, "INT8": 1, "BOOL": 1, "UINT16": 2, "INT16": 2}
_LONG_TYPES = ("UINT64", "INT64", "FLOAT64")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's bytes as a numpy array, and the name of its type."""

    data: Any
    type: str


@dataclass(frozen=True)
class GgufValue:
    """A key's value and its type; `element_type` is for the elements of a list."""

    value: Any
    type: Any
    element_type: Any = None


def typed(value: Any) -> GgufValue:
    """Return the value of a key, or a list, with the type that llama.cpp expects of such
    values.
    """
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    if not isinstance(value, list):
        return GgufValue(value, kinds[type(value)])
    element = kinds[type(value[0])]
    if element == gguf.GGUFValueType.UINT32:
        element = gguf.GGUFValueType.INT32
    return GgufValue(value, gguf.GGUFValueType.ARRAY, element)


@dataclass(frozen=True)
class Arrangement:
    """How a file stores a tensor of the model.

    The rows of `heads` heads are interleaved, so that the two halves that a rotation mixes are
    side by side. Rows that `grouped_heads` heads have as query, key and value of each become
    all queries, all keys and all values. `half` is the part of each expert's rows that a tensor
    has. A matrix may be transposed. `added` is what llama.cpp expects a norm's weight to
    contain already.
    """

    heads: int = 0
    added: float = 0.0
    grouped_heads: int = 0
    half: int | None = None
    is_transposed: bool = False

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows, of values or of bytes, in the file's order."""
        if self.half is not None:
            return x.chunk(2, -2)[self.half]
        columns = x.shape[1:]
        if self.grouped_heads:
            layers = x.reshape(self.grouped_heads, _LAYERS, -1, *columns)
            return layers.transpose(0, 1).reshape(x.shape)
        if self.heads:
            halves = x.reshape(self.heads, 2, -1, *columns)
            return halves.transpose(1, 2).reshape(x.shape)
        return x

    def coded(self, x: Tensor, value: Tensor) -> Tensor:
        """Return the rows of a quantized matrix in the file's order.

        Args:
            x: [rows, columns], of bytes or of decoded values; the rows of experts are one below
                the other.
            value: the tensor in the model.
        """
        if value.dim() == _STACK_RANK:
            x = x.view(len(value), -1, x.shape[-1])
        return self.rows(x)

    def values(self, x: Tensor) -> Tensor:
        """Return the values as the file has them."""
        if self.added:
            x = x.float() + self.added
        if self.is_transposed:
            x = x.T
        return self.rows(x)


@dataclass(frozen=True)
class Outline:
    """A file without the model's tensors.

    Attributes:
        tensors: for each name in the file, in order, the name in the model and the arrangement.
        constant: tensors that do not come from the model.
        config: that of the model, if transformers does not find all of it in the keys.
    """

    architecture: str
    keys: Mapping[str, GgufValue]
    tensors: Mapping[str, tuple[str, Arrangement]]
    constant: Mapping[str, GgufTensor] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    config: Any = None


def stored_tensors(
    outline: Outline, blocks: Mapping[str, QuantizedTensor], values: Mapping[str, Tensor]
) -> dict[str, GgufTensor]:
    """Return the tensors of a file by name, those in `blocks` as codes, others as `values`."""
    tensors: dict[str, GgufTensor] = {}
    for name, (source, arrangement) in outline.tensors.items():
        if source not in blocks:
            arranged = arrangement.values(values[source])
            tensors[name] = _as_values(arranged.contiguous())
            continue
        kind = block_type(blocks[source].spec)
        # The target refuses other weights.
        assert kind is not None
        packed = packed_blocks(blocks[source])
        rows = arrangement.coded(packed, values[source])
        tensors[name] = GgufTensor(rows.contiguous().numpy(), kind.name)
    return tensors | dict(outline.constant)


def file_bytes(outline: Outline, kinds: Mapping[str, str], values: Mapping[str, Tensor]) -> int:
    """Return the size of a file before its weights are quantized.

    Args:
        kinds: the types of blocks, by the names of weights in the model.
        values: the tensors of the model.
    """
    architecture = typed(outline.architecture)
    keys = {_ARCHITECTURE_KEY: architecture, **outline.keys, FILE_TYPE_KEY: typed(0)}
    start = _HEADER + sum(_key_bytes(name, key) for name, key in keys.items())
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    if _ALIGNMENT_KEY in keys:
        alignment = keys[_ALIGNMENT_KEY].value
    total = 0
    sizes = {
        name: (tensor.data.nbytes, tensor.data.ndim)
        for name, tensor in outline.constant.items()
    }
    for name, (source, arrangement) in outline.tensors.items():
        arranged = arrangement.values(values[source])
        if source in kinds:
            kind = gguf.GGMLQuantizationType[kinds[source]]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            sizes[name] = arranged.numel() // block * size, arranged.dim()
        else:
            sizes[name] = _as_values(arranged.contiguous()).data.nbytes, arranged.dim()
    for name, (size, axes) in sizes.items():
        start += _text_bytes(name) + 2 * _TYPE + (axes + 1) * _WORD
        total += gguf.GGUFWriter.ggml_pad(size, alignment)
    return gguf.GGUFWriter.ggml_pad(start, alignment) + total


def _key_bytes(name: str, key: GgufValue) -> int:
    """Return the bytes of a key with its name."""
    start = _text_bytes(name) + _TYPE
    if key.type != gguf.GGUFValueType.ARRAY:
        return start + _value_bytes(key.value, key.type)
    start += _TYPE + _WORD
    return start + sum(_value_bytes(value, key.element_type) for value in key.value)


def _value_bytes(value: Any, kind: Any) -> int:
    """Return the bytes of a single value of a type."""
    if kind == gguf.GGUFValueType.STRING:
        return _text_bytes(value)
    if kind.name in _LONG_TYPES:
        return _WORD
    return _SHORT_TYPES.get(kind.name, _TYPE)


def _text_bytes(text: str | bytes) -> int:
    """Return the bytes of a text with its length."""
    encoded = text.encode() if isinstance(text, str) else text
    return _WORD + len(encoded)


def _as_values(x: Tensor) -> GgufTensor:
    """Return vectors in float32, as engines expect, matrices in 16 bits if that is exact."""
    is_matrix = x.dim() > 1
    brain_floats = x.bfloat16()
    if is_matrix and x.dtype != torch.bfloat16 and torch.equal(x.half().to(x.dtype), x):
        return GgufTensor(x.half().numpy(), "F16")
    if is_matrix and torch.equal(brain_floats.to(x.dtype), x):
        return GgufTensor(brain_floats.view(torch.uint8).numpy(), "BF16")
    return GgufTensor(x.float().numpy(), "F32")


def write_gguf(path: Path, outline: Outline, tensors: Mapping[str, GgufTensor]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    writer = gguf.GGUFWriter(path, outline.architecture)
    try:
        keys = {**outline.keys, FILE_TYPE_KEY: _file_type(tensors)}
        for name, key in keys.items():
            writer.add_key_value(name, key.value, key.type, key.element_type)
        if _ALIGNMENT_KEY in outline.keys:
            writer.data_alignment = outline.keys[_ALIGNMENT_KEY].value
        for name, tensor in tensors.items():
            raw_dtype = gguf.GGMLQuantizationType[tensor.type]
            writer.add_tensor(name, tensor.data, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _file_type(tensors: Mapping[str, GgufTensor]) -> GgufValue:
    """Return what loaders call the file: the type that most of its matrices have."""
    types = Counter(tensor.type for tensor in tensors.values() if tensor.type != "F32")
    types_of_layers = {tensor.type for name, tensor in tensors.items() if "blk." in name}
    names = _MIXTURES if "Q6_K" in types_of_layers else _FILE_TYPES
    name = "ALL_F32"
    if types:
        most_common = types.most_common(1)[0][0]
        name = f"MOSTLY_{names.get(most_common, most_common)}"
    number = getattr(gguf.LlamaFileType, name, gguf.LlamaFileType.GUESSED)
    return GgufValue(int(number), gguf.GGUFValueType.UINT32)
