"""Scales of groups that are whole numbers of few bits times a float16 of their super-block, and
the codes of groups with a minimum.

Source: ggml's block_q4_K, block_q5_K and block_q6_K.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import BLOCK_SIZE, GPU_BLOCK_SIZE
from quantizer.numerics.formats import cast_round_trip_

SUPERBLOCK = 256
"""Consecutive values whose scales share a factor."""
LEAST_FACTOR = 2.0**-24
"""The least float16 above 0."""
_LARGEST_FACTOR = 65504.0


@dataclass(frozen=True)
class ScaleCodes:
    """The whole numbers that scales or minima of groups may be, from `least` to `most`.

    A scale of 0 would make 1 / scale infinite. The scale of code 1 has the same value, 0, for
    the format's code 0, so that nothing is lost without it.
    """

    least: int
    most: int
    has_zero: bool = False

    @property
    def outermost(self) -> tuple[int, ...]:
        """Return the codes that the number with the largest magnitude may have, the usual one
        first.
        """
        if self.least >= 0:
            return tuple(range(self.most, 0, -1))
        both = [*range(self.least, 0), *range(1, self.most + 1)]
        return tuple(sorted(both, key=abs, reverse=True))

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest code of each number, as floating point."""
        codes = x.round().clamp_(self.least, self.most)
        if self.has_zero:
            return codes
        beside_zero = torch.where(x < 0, max(self.least, -1), 1).to(codes)
        return torch.where(codes == 0, beside_zero, codes)


@dataclass(frozen=True)
class SuperBlockLayout:
    """How many groups a super-block has, and the codes of their scales and minima."""

    groups: int
    scales: ScaleCodes
    minima: ScaleCodes | None = None

    @property
    def group_size(self) -> int:
        """Return how many values share a scale."""
        return SUPERBLOCK // self.groups


_WITH_MINIMUM = SuperBlockLayout(8, ScaleCodes(1, 63), ScaleCodes(0, 63, has_zero=True))
SUPERBLOCKS = {
    "q4_k": _WITH_MINIMUM,
    "q5_k": _WITH_MINIMUM,
    "q6_k": SuperBlockLayout(16, ScaleCodes(-128, 127)),
}
"""The layouts of the formats that have super-blocks."""


def nearest_in_superblocks(numbers: Tensor, codes: ScaleCodes, groups: int) -> Tensor:
    """Return numbers near to these that super-blocks of `groups` groups can store, in their
    shape, as float64. Numbers that super-blocks store exactly stay.

    >>> numbers = torch.tensor([63.0, 31.4] + [0.1] * 6) / 1024
    >>> nearest = nearest_in_superblocks(numbers, ScaleCodes(1, 63), 8)
    >>> (nearest * 1024).tolist()
    [63.0, 31.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    stored, factor = split_superblocks(numbers, codes, groups)
    return (stored * factor).view(numbers.shape)


def split_superblocks(numbers: Tensor, codes: ScaleCodes, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes [super-blocks, groups] and factors [super-blocks, 1], both float64, whose
    products are the numbers, or near to them if there are no such.

    The factor is not unique. It is the least that gives all numbers back.
    """
    values = numbers.double().reshape(-1, groups)
    outermost = values.gather(1, values.abs().argmax(1, keepdim=True))
    factor = rounded_factor(outermost / codes.outermost[0])
    open_rows = torch.arange(len(values), device=values.device)
    for code in codes.outermost:
        candidate = outermost[open_rows] / code
        open_values = values[open_rows]
        stored = codes.nearest(open_values / candidate.where(candidate != 0, 1.0))
        is_half = candidate.half().double() == candidate
        is_exact = is_half[:, 0] & (stored * candidate == open_values).all(1)
        is_exact &= candidate[:, 0] != 0
        factor[open_rows[is_exact]] = candidate[is_exact]
        open_rows = open_rows[~is_exact]
        if not len(open_rows):
            break
    return codes.nearest(values / factor), factor


def rounded_factor(factor: Tensor) -> Tensor:
    """Return the nearest float16 that is not 0 and finite, with the dtype of `factor`."""
    magnitude = factor.abs().clamp(LEAST_FACTOR, _LARGEST_FACTOR).half().to(factor)
    return torch.where(factor < 0, -magnitude, magnitude)


_Part = tuple[Tensor, Tensor, Tensor, Tensor]
"""Some rows of two matrices, with their scales and their minima as columns."""


def fake_cast_with_minimum(rows: Tensor, scale: Tensor, minimum: Tensor, name: str) -> Tensor:
    """Return for each value of `rows` the nearest one that a code of the format `name` has.

    Args:
        rows: floating point [rows, values].
        scale, minimum: of each row, float32 [rows].
        name: of a format that `has_minimum`.

    >>> x = torch.tensor([[-0.6, 0.1, 1.1]])
    >>> fake_cast_with_minimum(x, torch.tensor([0.5]), torch.tensor([0.75]), "q4_k").tolist()
    [[-0.75, 0.25, 1.25]]
    """
    values = torch.empty_like(rows)
    for part, target, step, offset in _parts(rows, values, scale, minimum):
        target.copy_(_restored(_rounded(part, step, offset, name), step, offset))
    return values


def encode_with_minimum(
    rows: Tensor, scale: Tensor, minimum: Tensor, name: str
) -> Tensor | None:
    """Return the codes of values that `fake_cast_with_minimum` has returned, int8, or None if
    no codes give them back exactly.
    """
    codes = torch.empty_like(rows, dtype=torch.int8)
    for part, target, step, offset in _parts(rows, codes, scale, minimum):
        rounded = _rounded(part, step, offset, name)
        target.copy_(rounded)
        if not torch.equal(_restored(rounded, step, offset).to(part.dtype), part):
            return None
    return codes


def decode_with_minimum(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the values of codes [rows, values], float32."""
    return _restored(codes.float(), scale.reshape(-1, 1), minimum.reshape(-1, 1))


def _parts(rows: Tensor, twin: Tensor, scale: Tensor, minimum: Tensor) -> Iterator[_Part]:
    """Yield some rows of both matrices at a time."""
    size = BLOCK_SIZE if rows.is_cpu else GPU_BLOCK_SIZE
    height = max(1, size // rows.shape[1])
    yield from zip(
        torch.split(rows, height),
        torch.split(twin, height),
        torch.split(scale.reshape(-1, 1), height),
        torch.split(minimum.reshape(-1, 1), height),
        strict=True,
    )


def _rounded(part: Tensor, step: Tensor, offset: Tensor, name: str) -> Tensor:
    """Return codes as floating point, float32 at least."""
    return cast_round_trip_((part.float() + offset).div_(step), name)


def _restored(codes: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """Replace codes by their values. The product is exact, and the difference is rounded."""
    return codes.mul_(step).sub_(offset)
