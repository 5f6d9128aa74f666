"""The number formats other than plain integers, one row each."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantizer.numerics.registry import lookup

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000, 23),
    torch.float64: (torch.int64, 0x7FF << 52, 52),
}


@dataclass(frozen=True)
class FloatFormat:
    """A format of `bits` bits a value, whose largest finite value is `largest`.

    `storage` is the smallest torch dtype that holds its codes, which are its values times
    `factor`. `mantissa` is the number of bits after the binary point and `least` the exponent
    of the smallest normal value, below which values are 2^(least - mantissa) apart. `mantissa`
    is None for formats to which a cast to `storage` rounds, and for those that list their
    values in `levels`, ascending.

    A group of a format that `has_minimum` also has a float that is subtracted from its values.
    `scale_bits` are those of a scale with its minimum and its share of factors; 0 if its type
    decides.
    """

    bits: int
    storage: torch.dtype
    largest: float
    mantissa: int | None = None
    least: int = 0
    factor: float = 1.0
    levels: tuple[float, ...] = ()
    has_minimum: bool = False
    scale_bits: int = 0

    @property
    def has_signed_scale(self) -> bool:
        """Return whether one more value is negative, so that scales may have either sign."""
        return bool(self.levels) and -self.levels[0] > self.levels[-1]

    @property
    def emax(self) -> int:
        """Return the exponent of the largest value, from which shared exponents count (OCP MX
        v1.0, table 1).
        """
        return math.frexp(self.largest)[1] - 1


SEARCHED = ("q4_k", "q5_k", "q6_k", "iq4_nl")
"""The formats whose scales are always searched, as `block_search` does."""
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def listed_format(
    bits: int, levels: Iterable[int], *, has_minimum: bool = False, scale_bits: int = 0
) -> FloatFormat:
    """Return a format of codes in int8 that are the values themselves."""
    values = tuple(float(level) for level in levels)
    return FloatFormat(
        bits,
        torch.int8,
        values[-1],
        levels=values,
        has_minimum=has_minimum,
        scale_bits=scale_bits,
    )


FLOAT_FORMATS: dict[str, FloatFormat] = {
    "float32": FloatFormat(32, torch.float32, torch.finfo(torch.float32).max),
    "float16": FloatFormat(16, torch.float16, 65504.0),
    "bfloat16": FloatFormat(16, torch.bfloat16, torch.finfo(torch.bfloat16).max),
    "fp8_e4m3": FloatFormat(8, torch.float8_e4m3fn, 448.0, 3, -6),
    "fp8_e5m2": FloatFormat(8, torch.float8_e5m2, 57344.0, 2, -14),
    "fp6_e3m2": FloatFormat(6, torch.float8_e4m3fn, 28.0, 2, -2),
    "fp6_e2m3": FloatFormat(6, torch.float8_e4m3fn, 7.5, 3, 0),
    "fp4": FloatFormat(4, torch.float8_e4m3fn, 6.0, 1, 0),
    "mx_int8": FloatFormat(8, torch.int8, 127 / 64, 6, 0, factor=64.0),
    "bfp16": FloatFormat(8, torch.int8, 127 / 64, 6, 0, factor=64.0),
    "mx6": FloatFormat(5, torch.int8, 15 / 8, 3, 0, factor=8.0),
    "mx9": FloatFormat(8, torch.int8, 127 / 64, 6, 0, factor=64.0),
    "q4_k": listed_format(4, range(16), has_minimum=True, scale_bits=16),
    "q5_k": listed_format(5, range(32), has_minimum=True, scale_bits=16),
    "q6_k": listed_format(6, range(-32, 32), scale_bits=9),
    "iq4_nl": listed_format(4, _IQ4_LEVELS, scale_bits=16),
}
"""The formats by name. Source of the last four: ggml's block_q4_K to block_iq4_nl."""


def format_named(name: str) -> FloatFormat:
    """Return the row of a format.

    Raises:
        ValueError: there is no format of this name. The message lists the known ones.
    """
    return lookup(FLOAT_FORMATS, name, "floating-point format")


def has_minimum(name: str) -> bool:
    """Return whether groups of a format have a minimum. Integers have a zero point instead.

    >>> has_minimum("q4_k"), has_minimum("q6_k"), has_minimum("int")
    (True, False, False)
    """
    return name in FLOAT_FORMATS and FLOAT_FORMATS[name].has_minimum


def cast_round_trip_(x: Tensor, name: str, memory: Tensor | None = None) -> Tensor:
    """Replace each value of `x` by the nearest one of the format `name`, ties to even, in
    place, and return `x`.

    Values beyond the largest finite one become it, infinities too (a plain cast gives infinity
    in some formats and on some devices); NaN stays NaN. fp4 is E2M1; mx_int8, bfp16 and mx9 are
    codes k / 64 with |k| <= 127, and mx6 k / 8 with |k| <= 15, to be scaled by a power of two.
    Between two listed levels that are no neighbouring integers, a tie goes to the lower one.
    `memory` may be a tensor of the shape and dtype of `x` to work in.

    Raises:
        ValueError: there is no such format.

    Source: IEEE 754; "FP8 Formats for Deep Learning" (arXiv 2209.05433); "OCP Microscaling
    Formats (MX) v1.0"; mx6 and mx9: Rouhani et al., "With Shared Microexponents, A Little
    Shifting Goes a Long Way" (arXiv 2302.08007).

    >>> cast_round_trip_(torch.tensor([0.3, 1000.0, -1e9]), "fp8_e4m3").tolist()
    [0.3125, 448.0, -448.0]
    >>> cast_round_trip_(torch.tensor([0.25, 0.75, 2.5, 5.0, 7.0]), "fp4").tolist()
    [0.0, 1.0, 2.0, 4.0, 6.0]
    """
    row = format_named(name)
    if row.levels:
        return to_levels_(x, row)
    largest = min(row.largest, torch.finfo(x.dtype).max)
    x.clamp_(-largest, largest)
    if row.mantissa is None:
        return x.copy_(x.to(row.storage))
    if x.dtype not in _EXPONENT_BITS:
        return x.copy_(_round_(x.float(), row, None))
    return _round_(x, row, memory)


def _round_(x: Tensor, row: FloatFormat, memory: Tensor | None) -> Tensor:
    """Round float32 or float64 in the format's range to `mantissa` bits after the binary point
    of each value.

    Let p be the power of two below |x|. Adding 1.5 * 2^(bits - mantissa) * p leaves a sum whose
    last bit is worth 2^-mantissa * p. So the processor's own rounding, ties to even, is the
    right one. Subtracting the same number is exact.
    """
    assert row.mantissa is not None
    integers, exponent_mask, bits = _EXPONENT_BITS[x.dtype]
    shift = 1.5 * 2.0 ** (bits - row.mantissa)
    if row.emax == row.least:
        # The values of the format are evenly spaced
        shift *= 2.0**row.least
        return x.add_(shift).sub_(shift)
    if memory is not None:
        memory = memory.view(integers)
    exponents = torch.bitwise_and(x.view(integers), exponent_mask, out=memory)
    power = exponents.view(x.dtype).clamp_(min=2.0**row.least)
    return x.add_(power, alpha=shift).sub_(power, alpha=shift)


def to_levels_(x: Tensor, row: FloatFormat) -> Tensor:
    """Round to the nearest of the listed levels, in place."""
    least = row.levels[0]
    largest = row.levels[-1]
    x.clamp_(least, largest)
    if len(row.levels) == largest - least + 1:
        return x.round_()
    # All middles of two levels are multiples of 1/2, so halves between them have one level
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    halves = torch.mul(wide, 2).ceil_().sub_(2 * least).nan_to_num_(0)
    table = _levels_of_halves(row.levels).to(x)
    nearest = table.index_select(0, halves.to(torch.int32).reshape(-1)).view(x.shape)
    # Adds NaN to NaN
    return x.sub_(x).add_(nearest)


@cache
def _levels_of_halves(levels: tuple[float, ...]) -> Tensor:
    """Return the level nearest to all numbers of each interval (k / 2 - 1 / 2, k / 2], from the
    least level on.
    """
    values = torch.tensor(levels)
    middles = (values[1:] + values[:-1]) / 2
    ends = torch.arange(2 * levels[0], 2 * levels[-1] + 1) / 2
    return values[torch.bucketize(ends, middles)]
