"""Scales of groups that are whole numbers of few bits times a float16 of their super-block.

Source: ggml's block_q4_K, block_q5_K and block_q6_K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
