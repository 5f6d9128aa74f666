"""Turn codes with scales and zero points of groups into values, and unpack words of codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.codes import unpack, unpack_bits
from quantizer.numerics.two_level import unpack_scales

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
