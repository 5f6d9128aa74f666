"""Describe what a folder stores: the field `quantization_config` of its config.json, and
quantized layers. Their tensors are checked before their use. Codes with scales and zero points
of groups become values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantizer.config.json_types import JsonMapping
from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import first_names, listed, quoted
from quantizer.errors import ModelError
from quantizer.numerics.codes import unpack, unpack_bits
from quantizer.numerics.two_level import unpack_scales
from quantizer.sources.json_files import FLOAT_FOLDER_HELP
from quantizer.sources.tensor_kinds import dtype_name
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.opened_files import OpenFile


@dataclass(frozen=True)
class MethodSettings:
    """The settings of a method.

    Attributes:
        file: that they come from, for messages.
        fields: the settings by name.
    """

    file: Path
    fields: JsonMapping

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return str(self.fields.get("quant_method") or "an unknown method")

    def one_of(self, name: str, known: Sequence[Any], default: Any = None) -> Any:
        """Return a setting that must be one of some values.

        Raises:
            ModelError: it is another one.
        """
        value = self.fields.get(name)
        if value is None:
            value = default
        if value not in known:
            raise self.refusal(name, value, listed(known))
        return value

    def group_size(self) -> int | None:
        """Return the number of values of a group, or None if a row has one scale.

        Raises:
            ModelError: it is not an integer above zero, -1 or null.
        """
        size = self.fields.get("group_size")
        if size in (None, -1):
            return None
        if type(size) is not int or size < 1:
            raise self.refusal("group_size", size, "an integer above zero")
        return size

    def refusal(self, name: str, value: Any, expected: str) -> ModelError:
        """Return the error for a setting with a value that cannot be read.

        Args:
            name: of the setting.
            value: its value.
            expected: what can be read.
        """
        return ModelError(
            f"{self.file}: {name} of the quantization is {quoted(value)}, and quantizer reads "
            f"{expected}",
            help=FLOAT_FOLDER_HELP,
        )


FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_AGAIN = "copy or download the folder again, or give the folder of the float model"


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one layer.

    Attributes:
        path: of the layer.
        parts: its tensors, by the names that follow the path.
    """

    path: str
    parts: Mapping[str, DeferredTensor]

    def full_name(self, part: str) -> str:
        """Return the name of a tensor in its file."""
        return f"{self.path}.{part}" if self.path else part

    def load(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        return self.parts[name].load()

    def part(
        self,
        name: str,
        dtypes: Collection[torch.dtype],
        rank: int = 2,
        *,
        shape: Sequence[int] | None = None,
    ) -> DeferredTensor:
        """Return a tensor of the layer.

        Args:
            name: of the tensor.
            dtypes: that it may have.
            rank: the number of its axes, if no shape is given.
            shape: that it must have.

        Raises:
            ModelError: it is missing or empty, or has another dtype, shape or number of axes.
        """
        if name not in self.parts:
            stored = sorted(self.parts)
            raise ModelError(
                f"{self._file_of(stored[0])} has no {self.full_name(name)}, which its layer "
                f"needs in addition to {first_names(stored)}",
                help=_AGAIN,
            )
        tensor = self.parts[name]
        sizes = list(tensor.shape)
        if shape is not None:
            rank = len(shape)
        if tensor.dtype not in dtypes:
            known = " or ".join(map(dtype_name, dtypes))
            raise self.damage(name, f"is {dtype_name(tensor.dtype)}, not {known}")
        if len(sizes) != rank:
            raise self.damage(name, f"has the shape {sizes}, not {rank} axes")
        if not tensor.numel():
            raise self.damage(name, "has no values")
        if shape is not None and sizes != list(shape):
            raise self.damage(name, f"has the shape {sizes}, not {list(shape)}")
        return tensor

    def damage(self, name: str, why: str) -> ModelError:
        """Return the error for a tensor that does not fit the others.

        Args:
            name: of the tensor.
            why: the end of the sentence that the names of file and tensor begin.
        """
        place = f"{self._file_of(name)}: {self.full_name(name)}"
        return ModelError(f"{place} {why}", help=_AGAIN)

    def _file_of(self, name: str) -> str:
        place = self.parts[name].place
        if place is not None and isinstance(place.file, OpenFile):
            return str(place.file.path)
        return "the folder"


@dataclass(frozen=True)
class DequantizedLayer:
    """The float weights of a layer.

    Attributes:
        weights: by the names that follow the path.
        used: the names of the tensors that they are computed from, as far as there are such.
    """

    weights: Mapping[str, DeferredTensor]
    used: Collection[str]


class LayerReader(Protocol):
    """Dequantizes the layers of a folder."""

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weights of a layer, deferred; None if it is not quantized.

        Raises:
            ModelError: its tensors do not fit each other or the config.
        """


def split_into_layers(stored: Mapping[str, DeferredTensor]) -> list[StoredLayer]:
    """Return the tensors of a folder layer by layer, in the order of the folder."""
    parts_by_path: dict[str, dict[str, DeferredTensor]] = {}
    for name, tensor in stored.items():
        path, _, part = name.rpartition(".")
        parts_by_path.setdefault(path, {})[part] = tensor
    return [StoredLayer(path, parts) for path, parts in parts_by_path.items()]


def listed_groups(layer: StoredLayer, name: str, groups: int) -> Tensor:
    """Return the group of each column as a tensor of the layer lists it.

    Raises:
        ModelError: there are fewer groups.
    """
    numbers = layer.load(name).long()
    if int(numbers.min()) < 0 or int(numbers.max()) >= groups:
        raise layer.damage(name, f"names groups outside of 0 to {groups - 1}")
    return numbers


WORD_BITS = 32
_BLOCK_VALUES = 1 << 20
_FP4 = QuantizationSpec(dtype="fp4")


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix of codes.

    Attributes:
        codes: [rows, columns], integers or small floats.
        scale: float32 [rows, groups].
        groups: int64 [columns], the group of each column.
        zero_point: integers [rows, groups]; None if it is 0 everywhere.
    """

    codes: Tensor
    scale: Tensor
    groups: Tensor
    zero_point: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return scale * (code - zero_point), rounded once from float32 to `dtype`."""
        values = torch.empty(self.codes.shape, dtype=dtype)
        rows, columns = values.shape
        step = max(1, _BLOCK_VALUES // columns)
        for start in range(0, rows, step):
            block = slice(start, start + step)
            part = self.codes[block].float()
            if self.zero_point is not None:
                part -= self.zero_point[block, self.groups]
            values[block] = part.mul_(self.scale[block, self.groups])
        return values


def column_groups(columns: int, group_size: int) -> Tensor:
    """Return the group of each column, where groups are runs of columns.

    >>> column_groups(5, 2).tolist()
    [0, 0, 1, 1, 2]
    """
    # A config may have groups of any size
    size = min(group_size, columns)
    return torch.arange(columns) // size


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return uint8 codes [rows, columns] of rows of int32 words. Each row is a stream of bits,
    the first code in the lowest bits.

    >>> unpack_words(torch.tensor([[0x21]], dtype=torch.int32), 4, 3).tolist()
    [[1, 2, 0]]
    """
    stream = words.contiguous().view(torch.uint8)
    return unpack_bits(stream, bits, columns)


def words_of(codes: int, bits: int) -> int:
    """Return the number of words that hold so many codes.

    >>> words_of(9, 4)
    2
    """
    return -(-codes * bits // WORD_BITS)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Return the fp4 values [rows, 2 * n] of bytes [rows, n], in fp8_e4m3. The first of two
    values is in the lower bits.
    """
    rows, pairs = packed.shape
    return unpack(packed.reshape(-1), _FP4, (rows, 2 * pairs))


def float_scales(stored: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Return stored scales as float32.

    Args:
        stored: floats, or exponents with 127 added (uint8 or fp8_e8m0).
        global_scale: what the scales have to be divided by.
    """
    if stored.dtype == torch.float8_e8m0fnu:
        stored = stored.view(torch.uint8)
    if stored.dtype == torch.uint8:
        return unpack_scales(stored, "e8m0")
    if global_scale is not None:
        return stored.float() / global_scale.float()
    return stored.float()
