"""From a range of real values to scale and zero point, in float64. Rounds no tensor and knows
no rounding mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import FEW
from quantizer.numerics.formats import FloatFormat, format_named
from quantizer.numerics.two_level import global_scale_of, on_global_grid, with_microexponents

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: 1 / scale stays finite
# Two steps below infinity, for the rounding of the scale itself to float32
LARGEST_VALUE = 2.0**128 - 2.0**105
_MANTISSA = (1 << 52) - 1  # the bits of a float64's mantissa
SCALE_MODES = ("floor", "even", "ceil")
SYMMETRIC_SCALES = ("quant_max", "half_range")
SHARED = ("e8m0", "microexponent")
POWERS_OF_TWO = ("poweroftwo", *SHARED)
# Of the scales that eight bits of exponent hold (OCP MX v1.0, 5.4.1)
SMALLEST_SHARED = 2.0**-127


@dataclass(frozen=True)
class IntegerRange:
    """The integer codes of a tensor, and what its scale may be.

    `scale_type` is "float", "e4m3" (a number of fp8_e4m3 times the tensor's own float) or
    "poweroftwo", the latter at least 2^-`finest_position` where a device asks for that.
    `symmetric_scale` says what the largest magnitude is divided by where the scale is a
    symmetric float: "quant_max", or "half_range", (quant_max - quant_min) / 2, where codes have
    both signs.

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
        if self.scale_type not in ("float", "e4m3", "poweroftwo"):
            raise ValueError(
                f'"{self.scale_type}" is not a scale type; known are float, e4m3, poweroftwo.'
            )
        if self.symmetric_scale not in SYMMETRIC_SCALES:
            known = ", ".join(SYMMETRIC_SCALES)
            raise ValueError(
                f'"{self.symmetric_scale}" is not a rule for symmetric scales; known are '
                f"{known}."
            )

    @property
    def nonnegative(self) -> bool:
        """Whether negative values have no code."""
        return self.symmetric and self.quant_min == 0

    @property
    def largest(self) -> float:
        """What the largest magnitude is divided by to give a symmetric float scale."""
        half = self.symmetric_scale == "half_range" and self.quant_min < 0
        return (self.quant_max - self.quant_min) / 2 if half else self.quant_max

    @property
    def span(self) -> int:
        """The largest distance of a code from the zero point."""
        return (
            max(-self.quant_min, self.quant_max)
            if self.symmetric
            else self.quant_max - self.quant_min
        )

    @property
    def finest(self) -> float:
        """The least power-of-two scale."""
        return SMALLEST_SCALE if self.finest_position is None else 2.0**-self.finest_position


@dataclass(frozen=True)
class FloatRange:
    """A floating-point format whose values are scaled; `dtype` is its name in FLOAT_FORMATS.

    `scale_type` is "float", "e4m3" (a number of fp8_e4m3 times the tensor's own float),
    "poweroftwo" (the smallest that cuts nothing off), or "e8m0": 2^(e - emax) with e the
    exponent of the largest magnitude, rounded as `scale_mode` says. "floor" takes e as it is
    (OCP MX v1.0, 6.3), so that values may be cut off; "even" rounds the magnitude to the
    format's mantissa first, ties up; "ceil" takes the next exponent unless the magnitude is a
    power of two. "microexponent" is "e8m0" with at least half of the largest scale of a block,
    whose rows follow each other.

    Raises:
        ValueError: it is another scale type or mode, or there is no such format.
    """

    dtype: str
    scale_type: str = "float"
    scale_mode: str = "floor"
    symmetric: bool = True

    def __post_init__(self) -> None:
        format_named(self.dtype)
        if not self.symmetric:
            raise ValueError(f"{self.dtype} has no zero point, so its range is symmetric.")
        if self.scale_type not in (*POWERS_OF_TWO, "float", "e4m3"):
            known = ", ".join(("float", "e4m3", *POWERS_OF_TWO))
            raise ValueError(f'"{self.scale_type}" is not a scale type; known are {known}.')
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(
                f'"{self.scale_mode}" is not a scale mode; known are {", ".join(SCALE_MODES)}.'
            )

    @property
    def row(self) -> FloatFormat:
        """The format itself."""
        return format_named(self.dtype)

    @property
    def largest(self) -> float:
        """The largest value before scaling."""
        return self.row.largest

    span = largest

    @property
    def finest(self) -> float:
        """The least power-of-two scale."""
        return SMALLEST_SHARED if self.scale_type in SHARED else SMALLEST_SCALE


CodeRange = IntegerRange | FloatRange


@dataclass(frozen=True)
class QParams:
    """`scale` float32 and `zero_point` int32, both of one shape: () for a tensor, (C,) for its
    channels or rows.
    """

    scale: Tensor
    zero_point: Tensor

    def to(self, device: torch.device) -> QParams:
        """The same on a device: that of the values they go with, where ranges are found on the
        CPU.
        """
        return QParams(self.scale.to(device), self.zero_point.to(device))


def power_of_two(step: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each `step` (float64, normal or 0; 0
    stays 0).

    >>> power_of_two(torch.tensor([0.0, 0.25, 0.26, 3.0], dtype=torch.float64)).tolist()
    [0.0, 0.25, 0.5, 4.0]
    """
    return _truncate_(step.clone(), _MANTISSA)


def step_from_range(low: Tensor, high: Tensor, code_range: CodeRange) -> Tensor:
    """Return the distance of two codes, float64, that makes [low, high] fit the codes; 0 for an
    empty range.

    The range is first extended to contain 0. A float step puts the largest magnitude on
    quant_max (symmetric; half a step above it with the rule "half_range") or the ends of the
    range on the least and the greatest code. A power-of-two step is the finest one that cuts
    off at most half a step, if symmetric: 2^-fp >= max(low / (quant_min - 0.5), high /
    (quant_max + 0.5)). For a FloatRange it is the scale that its docstring says.

    Source: the fix position of pytorch_nndct 3.5.

    >>> step_from_range(
    ...     torch.tensor(-1.0),
    ...     torch.tensor(0.5),
    ...     IntegerRange(-128, 127, scale_type="poweroftwo"),
    ... ).item()
    0.0078125
    >>> step_from_range(torch.tensor(-7.0), torch.tensor(0.5), FloatRange("fp4", "e8m0")).item()
    1.0
    >>> code_range = IntegerRange(-8, 7, symmetric_scale="half_range")
    >>> step_from_range(torch.tensor(-1.0), torch.tensor(15.0), code_range).item()
    2.0
    """
    if isinstance(code_range, FloatRange) and code_range.scale_type in SHARED:
        step = _truncate_(_amax(low, high), _bump(code_range, 52)).mul_(
            2.0**-code_range.row.emax
        )
        return step if code_range.scale_type == "e8m0" else with_microexponents(step)
    if not code_range.symmetric:
        step = high.clamp(min=0).double().sub_(low.clamp(max=0)).div_(code_range.span)
    elif isinstance(code_range, IntegerRange) and code_range.scale_type == "poweroftwo":
        ends = (
            low.double() / (code_range.quant_min - 0.5),
            high.double() / (code_range.quant_max + 0.5),
        )
        step = torch.maximum(*ends).clamp_(min=0)
    else:
        step = symmetric_step(_amax(low, high), code_range)
    return _truncate_(step, _MANTISSA) if code_range.scale_type == "poweroftwo" else step


def symmetric_step(amax: Tensor, code_range: CodeRange) -> Tensor:
    """Return the distance of two codes, as a float, for values of at most `amax`: the one place
    with this division.

    >>> symmetric_step(
    ...     torch.tensor(7.5), IntegerRange(-8, 7, symmetric_scale="half_range")
    ... ).item()
    1.0
    """
    return amax / code_range.largest


def uncut(code_range: CodeRange) -> float:
    """Return the scale that cuts nothing off as a multiple of the one that the symmetric rule
    gives, at least 1.

    It is more than 1 with the rule "half_range" only; searches try it as well.

    >>> uncut(IntegerRange(-2, 1, symmetric_scale="half_range")), uncut(IntegerRange(-2, 1))
    (1.5, 1.0)
    """
    searched = (
        isinstance(code_range, IntegerRange)
        and code_range.symmetric
        and code_range.scale_type == "float"
    )
    return code_range.largest / code_range.quant_max if searched else 1.0  # type: ignore[union-attr]


def qparams_from_step(step: Tensor, low: Tensor, code_range: CodeRange) -> QParams:
    """Return the scale next to `step` that float32 and the codes allow, and the zero point for
    `low` to be quant_min.

    `step` and `low` are float64 of one shape. A step of 0 (nothing but zeros) gives scale 1, or
    the finest power of two that is allowed; other scales are kept in [2^-126, largest float32 /
    largest code], so that neither 1 / scale nor any code times scale is infinite; shared
    exponents are at least -127. Those of type e4m3 are taken for all groups of one tensor. The
    zero point is rounded to even, is a code, and is 0 for symmetric ones.
    """
    return _qparams(
        power_of_two(step) if code_range.scale_type in POWERS_OF_TWO else step, low, code_range
    )


def _qparams(step: Tensor, low: Tensor, code_range: CodeRange) -> QParams:
    """The same where the step is one that the scale type allows."""
    least, most = _scale_bounds(code_range)
    silent = (
        least
        if isinstance(code_range, IntegerRange) and code_range.finest_position is not None
        else 1.0
    )
    scale, zeros = step.clamp(least, most), _zeros(step)
    if zeros is not None:
        scale.masked_fill_(zeros, silent)
    if code_range.scale_type == "e4m3":
        scale = on_global_grid(step.clamp(max=most), global_scale_of(step)).double()
    if code_range.symmetric or isinstance(code_range, FloatRange):
        return QParams(scale.float(), torch.zeros_like(scale, dtype=torch.int32))
    zero_point = code_range.quant_min - torch.round(low.double().clamp(max=0) / scale)
    return QParams(
        scale.float(),
        zero_point.clamp(code_range.quant_min, code_range.quant_max).to(torch.int32),
    )


def _amax(low: Tensor, high: Tensor) -> Tensor:
    """The largest magnitude in [low, high], float64 in memory of its own; exact in the dtype of
    the two.
    """
    return torch.maximum(-low, high).clamp_(min=0).to(torch.float64, copy=True)


def _bump(code_range: FloatRange, bits: int) -> int:
    """What to add to the last of a mantissa of so many bits, for its carry to raise exponents
    as the mode says.
    """
    half = 0 if code_range.row.mantissa is None else 1 << (bits - 1 - code_range.row.mantissa)
    return {"floor": 0, "even": half, "ceil": (1 << bits) - 1}[code_range.scale_mode]


def _truncate_(x: Tensor, bump: int) -> Tensor:
    """Replace `x` (float64, normal or 0) by the power of two below it plus `bump` in the last
    bit of its mantissa.
    """
    x.view(torch.int64).add_(bump).bitwise_and_(~_MANTISSA)
    return x


def _scale_bounds(code_range: CodeRange) -> tuple[float, float]:
    """The least and the largest scale that is allowed."""
    largest = LARGEST_VALUE / code_range.span
    if code_range.scale_type not in POWERS_OF_TWO:
        return SMALLEST_SCALE, largest
    mantissa, exponent = math.frexp(largest)
    return code_range.finest, 2.0 ** (exponent - 1 - (mantissa == 0.5))


def qparams_from_range(low: Tensor, high: Tensor, code_range: CodeRange) -> QParams:
    """Return scale and zero point for values in [low, high]: tensors of one shape, finite.

    >>> asymmetric = IntegerRange(0, 255, symmetric=False)
    >>> qparams = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.55), asymmetric)
    >>> round(qparams.scale.item(), 6), qparams.zero_point.item()
    (0.01, 100)
    """
    is_traced = torch.compiler.is_compiling()  # a trace must not ask how many there are
    if (
        not is_traced
        and isinstance(code_range, FloatRange)
        and _bits_say_all(low.dtype, code_range)
    ):
        return _shared_scale(low, high, code_range)
    if is_traced or low.numel() <= FEW or code_range.scale_type == "e4m3":
        return _qparams(step_from_range(low, high, code_range), low, code_range)
    scale, zero_point = (
        torch.empty_like(low, dtype=dtype) for dtype in (torch.float32, torch.int32)
    )
    parts = (torch.split(end.view(-1), FEW) for end in (low, high, scale, zero_point))
    for least, greatest, scale_part, zero_point_part in zip(*parts, strict=True):
        found = _qparams(step_from_range(least, greatest, code_range), least, code_range)
        scale_part.copy_(found.scale)
        zero_point_part.copy_(found.zero_point)
    return QParams(scale, zero_point)


def _bits_say_all(dtype: torch.dtype, code_range: FloatRange) -> bool:
    """Whether the bits of float32 give the scale that float64 would.

    Below the normal numbers no bits hold the exponent, but there the scale is the least one, if
    emax > 0 or nothing carries.
    """
    carries = code_range.row.emax <= 0 and code_range.scale_mode != "floor"
    return dtype == torch.float32 and code_range.scale_type == "e8m0" and not carries


def _shared_scale(low: Tensor, high: Tensor, code_range: FloatRange) -> QParams:
    """The same where `_bits_say_all`, in the memory of the scale: a fifth of the time."""
    scale = torch.neg(low)
    torch.maximum(scale, high, out=scale)  # not negative, as low <= high
    zeros = _zeros(scale)
    least, most = torch.tensor(_scale_bounds(code_range)).view(torch.int32).tolist()
    bits = (
        scale.view(torch.int32)
        .add_(_bump(code_range, 23))
        .bitwise_and_(0x7F800000)
        .sub_(code_range.row.emax << 23)
    )
    bits.clamp_(least, most)
    return QParams(
        scale if zeros is None else scale.masked_fill_(zeros, 1.0), torch.zeros_like(bits)
    )


def _zeros(amax: Tensor) -> Tensor | None:
    """Where `amax`, which is not negative, is 0; None for nowhere, as masks cost more than all
    the rest.
    """
    if not torch.compiler.is_compiling() and amax.numel() and bool(amax.min() > 0):
        return None
    return amax == 0
