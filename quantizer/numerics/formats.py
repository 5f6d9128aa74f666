"""Round to the number formats other than plain integers, which are rows of `tables`."""

from functools import cache

import torch
from torch import Tensor

from quantizer.numerics.registry import lookup
from quantizer.rows import NumberFormat
from quantizer.tables import NUMBER_FORMATS

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000, 23),
    torch.float64: (torch.int64, 0x7FF << 52, 52),
}


def format_named(name: str) -> NumberFormat:
    """Return the row of a format.

    Raises:
        ValueError: there is no format of this name. The message lists the known ones.
    """
    return lookup(NUMBER_FORMATS, name, "floating-point format")


def storage_of(row: NumberFormat) -> torch.dtype:
    """Return the torch dtype that holds the codes of a format."""
    storage: torch.dtype = getattr(torch, row.storage)
    return storage


def has_minimum(name: str) -> bool:
    """Return whether groups of a format have a minimum. Integers have a zero point instead.

    >>> has_minimum("q4_k"), has_minimum("q6_k"), has_minimum("int")
    (True, False, False)
    """
    return name in NUMBER_FORMATS and NUMBER_FORMATS[name].has_minimum


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
        return x.copy_(x.to(storage_of(row)))
    if x.dtype not in _EXPONENT_BITS:
        return x.copy_(_round_(x.float(), row, None))
    return _round_(x, row, memory)


def _round_(x: Tensor, row: NumberFormat, memory: Tensor | None) -> Tensor:
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


def to_levels_(x: Tensor, row: NumberFormat) -> Tensor:
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
