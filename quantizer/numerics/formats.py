"""The codes of a tensor and the scales that it may have, and rounding to the number formats
other than plain integers, which are rows of `tables`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from quantizer.rows import NumberFormat, lookup
from quantizer.tables import NUMBER_FORMATS

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: 1 / scale stays finite."""
SHARED_EXPONENTS = ("e8m0", "microexponent")
POWERS_OF_TWO = ("poweroftwo", *SHARED_EXPONENTS)
SCALE_MODES = ("floor", "even", "ceil")
SYMMETRIC_SCALES = ("quant_max", "half_range", "quant_min")
PAIRS = 8
"""Pairs of values in a block of 16 that share an exponent."""
_SMALLEST_SHARED = 2.0**-127
"""The smallest scale that the eight bits of a shared exponent hold (OCP MX v1.0, 5.4.1)."""
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


@dataclass(frozen=True)
class IntegerRange:
    """The integer codes of a tensor, and the scales that it may have.

    Attributes:
        quant_min, quant_max: the smallest and the largest code.
        symmetric: whether the zero point is 0.
        scale_type: "float", "e4m3" (a number of fp8_e4m3 times one float of the tensor) or
            "poweroftwo".
        finest_position: if a device has one, powers of two are at least 2^-finest_position.
        symmetric_scale: the divisor of the largest magnitude for a symmetric float scale. It is
            "quant_max", or "half_range", (quant_max - quant_min) / 2, if codes have both signs.
            With "quant_min" the value of the largest magnitude gets that code, so that the
            scale of a positive one is negative. It needs a code more below zero than above.

    Raises:
        ValueError: no code is above zero, or a word is not known.
    """

    quant_min: int
    quant_max: int
    symmetric: bool = True
    scale_type: str = "float"
    finest_position: int | None = None
    symmetric_scale: str = "quant_max"

    def __post_init__(self) -> None:
        if not self.quant_min <= 0 < self.quant_max:
            raise ValueError(
                f"Codes need quant_min <= 0 < quant_max, not {self.quant_min} and "
                f"{self.quant_max}."
            )
        _require_known(self.scale_type, ("float", "e4m3", "poweroftwo"), "scale type")
        _require_known(self.symmetric_scale, SYMMETRIC_SCALES, "rule for symmetric scales")

    @property
    def nonnegative(self) -> bool:
        """Return whether negative values have no code."""
        return self.symmetric and self.quant_min == 0

    @property
    def has_signed_scale(self) -> bool:
        """Return whether scales may be negative."""
        is_float = self.symmetric and self.scale_type == "float"
        has_extra_code = -self.quant_min > self.quant_max
        return is_float and has_extra_code and self.symmetric_scale == "quant_min"

    @property
    def largest(self) -> float:
        """Return what the largest magnitude is divided by for a symmetric float scale."""
        if self.has_signed_scale:
            return -self.quant_min
        if self.symmetric_scale == "half_range" and self.quant_min < 0:
            return (self.quant_max - self.quant_min) / 2
        return self.quant_max

    @property
    def span(self) -> int:
        """Return the largest distance of a code from the zero point."""
        if self.symmetric:
            return max(-self.quant_min, self.quant_max)
        return self.quant_max - self.quant_min

    @property
    def finest(self) -> float:
        """Return the least power-of-two scale."""
        return SMALLEST_SCALE if self.finest_position is None else 2.0**-self.finest_position


@dataclass(frozen=True)
class FloatRange:
    """A floating-point format whose values are scaled; `dtype` is its name in NUMBER_FORMATS.

    The scale types are:

    - "float": any float32.
    - "e4m3": a number of fp8_e4m3 times one float of the tensor.
    - "poweroftwo": the smallest power of two that clips nothing.
    - "e8m0": 2^(e - emax), with e the exponent of the largest magnitude.
    - "microexponent": like "e8m0" for each pair of values, but at least half of the largest
      scale of the pair's block. The pairs of a block follow each other.
    - "superblock": whole numbers of few bits times a float16 that some groups share.

    The scale modes decide the exponent e of a shared exponent:

    - "floor" takes it as it is, so that values may be clipped (OCP MX v1.0, 6.3).
    - "even" first rounds the magnitude to the format's mantissa, ties up.
    - "ceil" takes the next exponent unless the magnitude is a power of two.

    Attributes:
        shared_step: the largest step of all tensors that share the scale, or the float of
            scales of type "e4m3". None if the tensor shares nothing.

    Raises:
        ValueError: it is another scale type or mode, or there is no such format.
    """

    dtype: str
    scale_type: str = "float"
    scale_mode: str = "floor"
    symmetric: bool = True
    shared_step: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        format_named(self.dtype)
        if self.row.levels and self.scale_type in SHARED_EXPONENTS:
            raise ValueError(f"{self.dtype} has no shared exponents.")
        if not self.symmetric:
            raise ValueError(f"{self.dtype} has no zero point, so its range is symmetric.")
        scale_types = ("float", "e4m3", *POWERS_OF_TWO, "superblock")
        _require_known(self.scale_type, scale_types, "scale type")
        _require_known(self.scale_mode, SCALE_MODES, "scale mode")

    @property
    def row(self) -> NumberFormat:
        """Return the format itself."""
        return format_named(self.dtype)

    @property
    def has_signed_scale(self) -> bool:
        """Return whether scales may be negative."""
        return self.row.has_signed_scale

    @property
    def largest(self) -> float:
        """Return the largest magnitude before scaling."""
        return -self.row.levels[0] if self.has_signed_scale else self.row.largest

    span = largest

    @property
    def has_zero(self) -> bool:
        """Return whether 0 is a value of the format."""
        return not self.row.levels or 0.0 in self.row.levels

    @property
    def finest(self) -> float:
        """Return the least power-of-two scale."""
        return _SMALLEST_SHARED if self.scale_type in SHARED_EXPONENTS else SMALLEST_SCALE


CodeRange = IntegerRange | FloatRange


def _require_known(word: str, known: Sequence[str], kind: str) -> None:
    """Raise `ValueError` if a word is none of the known ones; `kind` says what it should be."""
    lookup(dict.fromkeys(known), word, kind)


def scale_bytes(scale_type: str, scales: int) -> int:
    """Return the bytes of the scales of one tensor.

    >>> scale_bytes("e4m3", 16), scale_bytes("microexponent", 16), scale_bytes("float", 16)
    (20, 4, 64)
    """
    if scale_type == "e8m0":
        return scales
    if scale_type == "e4m3":
        return scales + 4
    if scale_type == "microexponent":
        return 2 * scales // PAIRS
    return 4 * scales
