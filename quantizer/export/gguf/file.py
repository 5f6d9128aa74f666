"""What a GGUF file holds, and writes it: keys, and tensors as blocks or as values. Knows no
architecture.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantizer.export.gguf.blocks import block_type, packed
from quantizer.nn.quantized_tensor import QuantizedTensor

FILE_TYPE = "general.file_type"
_ALIGNMENT = "general.alignment"
_VALUES = {"F32": "ALL_F32"}


@dataclass(frozen=True)
class Stored:
    """A tensor's bytes as an array of numpy, and the name of its type."""

    data: Any
    type: str


@dataclass(frozen=True)
class Entry:
    """A key's value and its type; `part` is that of a list's elements."""

    value: Any
    type: Any
    part: Any = None


@dataclass(frozen=True)
class Arrangement:
    """How a file has a tensor of the model.

    The rows of `heads` heads are interleaved, so that the two halves that a rotation mixes lie
    side by side; `added` is what llama.cpp wants a norm's weight to contain already.
    """

    heads: int = 0
    added: float = 0.0

    def rows(self, x: Tensor) -> Tensor:
        """The rows, of values or of bytes, in the file's order."""
        if not self.heads:
            return x
        return x.reshape(self.heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    def values(self, x: Tensor) -> Tensor:
        """The values as the file has them."""
        return self.rows(x + self.added if self.added else x)


@dataclass(frozen=True)
class Outline:
    """A file but for the model's tensors: `keys`, tensors that `stay`, and for each of the
    model's in the file's order its name there, with the name in the model and the arrangement.
    """

    architecture: str
    keys: Mapping[str, Entry]
    tensors: Mapping[str, tuple[str, Arrangement]]
    stay: Mapping[str, Stored] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def stored(
    outline: Outline, blocks: Mapping[str, QuantizedTensor], values: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """The tensors of a file by their names in it; those in `blocks` as codes, others as
    `values`.
    """
    found = {}
    for name, (source, arranged) in outline.tensors.items():
        if source in blocks:
            kind = block_type(blocks[source].spec)
            assert kind is not None  # as the target has looked
            found[name] = Stored(
                arranged.rows(packed(blocks[source])).contiguous().numpy(), kind.name
            )
        else:
            found[name] = _value(arranged.values(values[source]).contiguous())
    return found | dict(outline.stay)


def _value(x: Tensor) -> Stored:
    """Vectors in float32, as engines want them; matrices in 16 bits where these give them back
    exactly.
    """
    if x.dim() > 1 and x.dtype == torch.bfloat16:
        return Stored(x.view(torch.uint8).numpy(), "BF16")
    if x.dim() > 1 and torch.equal(x.half().to(x.dtype), x):
        return Stored(x.half().numpy(), "F16")
    return Stored(x.float().numpy(), "F32")


def write(path: Path, outline: Outline, tensors: Mapping[str, Stored]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    writer = gguf.GGUFWriter(path, outline.architecture)
    try:
        for name, entry in {**outline.keys, FILE_TYPE: _file_type(tensors)}.items():
            writer.add_key_value(name, entry.value, entry.type, entry.part)
        if _ALIGNMENT in outline.keys:
            writer.data_alignment = outline.keys[_ALIGNMENT].value
        for name, tensor in tensors.items():
            writer.add_tensor(
                name, tensor.data, raw_dtype=gguf.GGMLQuantizationType[tensor.type]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _file_type(tensors: Mapping[str, Stored]) -> Entry:
    """What loaders call the file: the type that most of its matrices have."""
    kinds = Counter(
        tensor.type for tensor in tensors.values() if tensor.type != "F32"
    ) or Counter(["F32"])
    name = kinds.most_common(1)[0][0]
    number = getattr(
        gguf.LlamaFileType, _VALUES.get(name, f"MOSTLY_{name}"), gguf.LlamaFileType.GUESSED
    )
    return Entry(int(number), gguf.GGUFValueType.UINT32)
