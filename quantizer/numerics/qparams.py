"""From a range of real values to scale and zero point, in float64. Rounds no tensor and knows no rounding mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import FEW
from quantizer.numerics.formats import FloatFormat, format_named

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: 1 / scale stays finite
LARGEST_VALUE = 2.0**128 - 2.0**105  # two steps below infinity, for the rounding of the scale itself to float32
_MANTISSA = (1 << 52) - 1  # the bits of a float64's mantissa
SCALE_MODES = ("floor", "even", "ceil")
SMALLEST_SHARED = 2.0**-127  # of the scales that eight bits of exponent hold (OCP MX v1.0, 5.4.1)


@dataclass(frozen=True)
class Grid:
    """The integers a tensor is mapped to, and how.

    `scale_type` is "float" or "poweroftwo", the latter at least 2^-`finest_position` where a device asks for that.
    Raises ValueError if the grid has no code above zero.
    """

    quant_min: int
    quant_max: int
    symmetric: bool = True
    scale_type: str = "float"
    finest_position: int | None = None

    def __post_init__(self) -> None:
        if not self.quant_min <= 0 < self.quant_max:
            raise ValueError(f"A grid needs quant_min <= 0 < quant_max, not {self.quant_min} and {self.quant_max}.")
        if self.scale_type not in ("float", "poweroftwo"):
            raise ValueError(f'"{self.scale_type}" is not a scale type; known are float, poweroftwo.')

    @property
    def nonnegative(self) -> bool:
        """Whether negative values have no code."""
        return self.symmetric and self.quant_min == 0

    @property
    def span(self) -> int:
        """The largest distance of a code from the zero point."""
        return max(-self.quant_min, self.quant_max) if self.symmetric else self.quant_max - self.quant_min

    @property
    def finest(self) -> float:
        """The least power-of-two scale."""
        return SMALLEST_SCALE if self.finest_position is None else 2.0**-self.finest_position


@dataclass(frozen=True)
class FloatGrid:
    """A floating-point format whose values are scaled; `dtype` is its name in FLOAT_FORMATS.

    `scale_type` is "float", "poweroftwo" (the smallest that cuts nothing off), or "e8m0": 2^(e - emax) with e the
    exponent of the largest magnitude, rounded as `scale_mode` says. "floor" takes e as it is (OCP MX v1.0, 6.3), so
    that values may be cut off; "even" rounds the magnitude to the format's mantissa first, ties up; "ceil" takes the
    next exponent unless the magnitude is a power of two. Raises ValueError for anything else.
    """

    dtype: str
    scale_type: str = "float"
    scale_mode: str = "floor"
    symmetric: bool = True

    def __post_init__(self) -> None:
        format_named(self.dtype)
        if not self.symmetric:
            raise ValueError(f"{self.dtype} has no zero point, so its range is symmetric.")
        if self.scale_type not in ("float", "poweroftwo", "e8m0"):
            raise ValueError(f'"{self.scale_type}" is not a scale type; known are float, poweroftwo, e8m0.')
        if self.scale_mode not in SCALE_MODES:
            raise ValueError(f'"{self.scale_mode}" is not a scale mode; known are {", ".join(SCALE_MODES)}.')

    @property
    def row(self) -> FloatFormat:
        """The format itself."""
        return format_named(self.dtype)

    @property
    def span(self) -> float:
        """The largest value before scaling."""
        return self.row.largest

    @property
    def finest(self) -> float:
        """The least power-of-two scale."""
        return SMALLEST_SHARED if self.scale_type == "e8m0" else SMALLEST_SCALE


@dataclass(frozen=True)
class QParams:
    """`scale` float32 and `zero_point` int32, both of one shape: () for a tensor, (C,) for its channels or rows."""

    scale: Tensor
    zero_point: Tensor


def power_of_two(step: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each `step` (float64, normal or 0; 0 stays 0).

    >>> power_of_two(torch.tensor([0.0, 0.25, 0.26, 3.0], dtype=torch.float64)).tolist()
    [0.0, 0.25, 0.5, 4.0]
    """
    return _truncate_(step.clone(), _MANTISSA)


def step_from_range(low: Tensor, high: Tensor, grid: Grid | FloatGrid) -> Tensor:
    """Return the distance of two codes, float64, that makes [low, high] fit the grid; 0 for an empty range.

    The range is first extended to contain 0. A float step puts the largest magnitude on quant_max (symmetric) or the
    ends of the range on the ends of the grid. A power-of-two step is the finest one that cuts off at most half a step:
    2^-fp >= max(low / (quant_min - 0.5), high / (quant_max + 0.5)) if symmetric, the fix position of pytorch_nndct.
    For a FloatGrid it is the scale that its docstring says.

    >>> step_from_range(torch.tensor(-1.0), torch.tensor(0.5), Grid(-128, 127, scale_type="poweroftwo")).item()
    0.0078125
    >>> step_from_range(torch.tensor(-7.0), torch.tensor(0.5), FloatGrid("fp4", "e8m0")).item()
    1.0
    """
    if isinstance(grid, FloatGrid) and grid.scale_type == "e8m0":
        return _shared_exponent_(_amax(low, high), grid)
    if not grid.symmetric:
        step = high.clamp(min=0).double().sub_(low.clamp(max=0)).div_(grid.span)
    elif isinstance(grid, Grid) and grid.scale_type == "poweroftwo":
        ends = low.double() / (grid.quant_min - 0.5), high.double() / (grid.quant_max + 0.5)
        step = torch.maximum(*ends).clamp_(min=0)
    else:
        step = _amax(low, high).div_(grid.quant_max if isinstance(grid, Grid) else grid.span)
    return _truncate_(step, _MANTISSA) if grid.scale_type == "poweroftwo" else step


def qparams_from_step(step: Tensor, low: Tensor, grid: Grid | FloatGrid) -> QParams:
    """Return the scale next to `step` that float32 and the grid allow, and the zero point that puts `low` on quant_min.

    `step` and `low` are float64 of one shape. A step of 0 (nothing but zeros) gives scale 1, or the grid's finest power
    of two; other scales are kept in [2^-126, largest float32 / largest code], so that neither 1 / scale nor any code
    times scale is infinite; those of type e8m0 are at least 2^-127. The zero point is rounded to even, lies on the
    grid, and is 0 for symmetric grids.
    """
    return _qparams(step if grid.scale_type == "float" else power_of_two(step), low, grid)


def _qparams(step: Tensor, low: Tensor, grid: Grid | FloatGrid) -> QParams:
    """The same where the step is one that the grid's scale type allows."""
    least, most = _scale_bounds(grid)
    silent = least if isinstance(grid, Grid) and grid.finest_position is not None else 1.0
    scale, zeros = step.clamp(least, most), _zeros(step)
    if zeros is not None:
        scale.masked_fill_(zeros, silent)
    if grid.symmetric or isinstance(grid, FloatGrid):
        return QParams(scale.float(), torch.zeros_like(scale, dtype=torch.int32))
    zero_point = grid.quant_min - torch.round(low.double().clamp(max=0) / scale)
    return QParams(scale.float(), zero_point.clamp(grid.quant_min, grid.quant_max).to(torch.int32))


def _amax(low: Tensor, high: Tensor) -> Tensor:
    """The largest magnitude in [low, high], float64 in memory of its own; exact in the dtype of the two."""
    return torch.maximum(-low, high).clamp_(min=0).to(torch.float64, copy=True)


def _shared_exponent_(amax: Tensor, grid: FloatGrid) -> Tensor:
    """2^(e - emax) in the place of `amax`, see FloatGrid; 0 for 0."""
    return _truncate_(amax, _bump(grid, 52)).mul_(2.0**-grid.row.emax)


def _bump(grid: FloatGrid, bits: int) -> int:
    """What to add to the last of a mantissa of so many bits, for its carry to raise exponents as the mode says."""
    half = 0 if grid.row.mantissa is None else 1 << (bits - 1 - grid.row.mantissa)
    return {"floor": 0, "even": half, "ceil": (1 << bits) - 1}[grid.scale_mode]


def _truncate_(x: Tensor, bump: int) -> Tensor:
    """Replace `x` (float64, normal or 0) by the power of two below it plus `bump` in the last bit of its mantissa."""
    x.view(torch.int64).add_(bump).bitwise_and_(~_MANTISSA)
    return x


def _scale_bounds(grid: Grid | FloatGrid) -> tuple[float, float]:
    """The least and the largest scale that the grid may have."""
    largest = LARGEST_VALUE / grid.span
    if grid.scale_type == "float":
        return SMALLEST_SCALE, largest
    mantissa, exponent = math.frexp(largest)
    return grid.finest, 2.0 ** (exponent - 1 - (mantissa == 0.5))


def qparams_from_range(low: Tensor, high: Tensor, grid: Grid | FloatGrid) -> QParams:
    """Return scale and zero point for values in [low, high]: tensors of one shape, finite.

    >>> asymmetric = Grid(0, 255, symmetric=False)
    >>> qparams = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.55), asymmetric)
    >>> round(qparams.scale.item(), 6), qparams.zero_point.item()
    (0.01, 100)
    """
    if torch.compiler.is_compiling():  # a trace must not ask how many there are
        return _qparams(step_from_range(low, high, grid), low, grid)
    if isinstance(grid, FloatGrid) and _bits_say_all(low.dtype, grid):
        return _shared_scale(low, high, grid)
    if low.numel() <= FEW:
        return _qparams(step_from_range(low, high, grid), low, grid)
    scale, zero_point = (torch.empty_like(low, dtype=dtype) for dtype in (torch.float32, torch.int32))
    parts = (torch.split(end.view(-1), FEW) for end in (low, high, scale, zero_point))
    for least, greatest, scale_part, zero_point_part in zip(*parts, strict=True):
        found = _qparams(step_from_range(least, greatest, grid), least, grid)
        scale_part.copy_(found.scale)
        zero_point_part.copy_(found.zero_point)
    return QParams(scale, zero_point)


def _bits_say_all(dtype: torch.dtype, grid: FloatGrid) -> bool:
    """Whether the bits of float32 give the scale that float64 would.

    Below the normal numbers no bits hold the exponent, but there the scale is the least one, if emax > 0 or nothing
    carries.
    """
    return dtype == torch.float32 and grid.scale_type == "e8m0" and (grid.row.emax > 0 or grid.scale_mode == "floor")


def _shared_scale(low: Tensor, high: Tensor, grid: FloatGrid) -> QParams:
    """The same where `_bits_say_all`, in the memory of the scale: a fifth of the time."""
    scale = torch.neg(low)
    torch.maximum(scale, high, out=scale)  # not negative, as low <= high
    zeros = _zeros(scale)
    least, most = torch.tensor(_scale_bounds(grid)).view(torch.int32).tolist()
    bits = scale.view(torch.int32).add_(_bump(grid, 23)).bitwise_and_(0x7F800000).sub_(grid.row.emax << 23)
    bits.clamp_(least, most)
    return QParams(scale if zeros is None else scale.masked_fill_(zeros, 1.0), torch.zeros_like(bits))


def _zeros(amax: Tensor) -> Tensor | None:
    """Where `amax`, which is not negative, is 0; None for nowhere, as masks cost more than all the rest."""
    if not torch.compiler.is_compiling() and amax.numel() and bool(amax.min() > 0):
        return None
    return amax == 0
