"""From a range of real values to scale and zero point, in float64. Rounds no tensor and knows no rounding mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: 1 / scale stays finite
LARGEST_VALUE = 2.0**128 - 2.0**105  # two steps below infinity, for the rounding of the scale itself to float32
FINEST_POSITION = {True: 12, False: 15}  # by bit_width <= 8: the most fraction bits the DPU takes (pytorch_nndct 3.5)


@dataclass(frozen=True)
class Grid:
    """The integers a tensor is mapped to, and how.

    `scale_type` is "float" or "poweroftwo". Raises ValueError if the grid has no code above zero.
    """

    quant_min: int
    quant_max: int
    symmetric: bool = True
    scale_type: str = "float"

    def __post_init__(self) -> None:
        if not self.quant_min <= 0 < self.quant_max:
            raise ValueError(f"A grid needs quant_min <= 0 < quant_max, not {self.quant_min} and {self.quant_max}.")
        if self.scale_type not in ("float", "poweroftwo"):
            raise ValueError(f'"{self.scale_type}" is not a scale type; known are float, poweroftwo.')

    @property
    def bit_width(self) -> int:
        """Bits that hold every code."""
        return (self.quant_max - self.quant_min).bit_length()


@dataclass(frozen=True)
class QParams:
    """`scale` float32 and `zero_point` int32, both of shape () for a tensor or (C,) for its channels."""

    scale: Tensor
    zero_point: Tensor


def power_of_two(step: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each `step` (float64, >= 0; 0 stays 0).

    >>> power_of_two(torch.tensor([0.0, 0.25, 0.26, 3.0], dtype=torch.float64)).tolist()
    [0.0, 0.25, 0.5, 4.0]
    """
    mantissa, exponent = torch.frexp(step)
    return torch.ldexp(torch.where(mantissa == 0.5, mantissa, mantissa.sign()), exponent)


def step_from_range(low: Tensor, high: Tensor, grid: Grid) -> Tensor:
    """Return the distance of two codes, float64, that makes [low, high] fit the grid; 0 for an empty range.

    The range is first extended to contain 0. A float step puts the largest magnitude on quant_max (symmetric) or the
    ends of the range on the ends of the grid. A power-of-two step is the finest one that cuts off at most half a step:
    2^-fp >= max(low / (quant_min - 0.5), high / (quant_max + 0.5)) if symmetric, the fix position of pytorch_nndct.

    >>> step_from_range(torch.tensor(-1.0), torch.tensor(0.5), Grid(-128, 127, scale_type="poweroftwo")).item()
    0.0078125
    """
    low, high = low.double().clamp(max=0), high.double().clamp(min=0)
    if not grid.symmetric:
        step = (high - low) / (grid.quant_max - grid.quant_min)
    elif grid.scale_type == "float":
        step = torch.maximum(-low, high) / grid.quant_max
    else:
        step = torch.maximum(low / (grid.quant_min - 0.5), high / (grid.quant_max + 0.5))
    return power_of_two(step) if grid.scale_type == "poweroftwo" else step


def qparams_from_step(step: Tensor, low: Tensor, grid: Grid) -> QParams:
    """Return the scale next to `step` that float32 and the grid allow, and the zero point that puts `low` on quant_min.

    `step` and `low` are float64 of one shape. A step of 0 (nothing but zeros) gives scale 1, or the finest power of
    two; other scales are kept in [2^-126, largest float32 / largest code], so that neither 1 / scale nor any code times
    scale is infinite. Power-of-two scales are at least 2^-12 up to 8 bits, else 2^-15. The zero point is rounded to
    even, lies on the grid, and is 0 for symmetric grids.
    """
    largest_code = max(-grid.quant_min, grid.quant_max) if grid.symmetric else grid.quant_max - grid.quant_min
    largest = torch.tensor(LARGEST_VALUE / largest_code, dtype=torch.float64)
    if grid.scale_type == "poweroftwo":
        finest = 2.0 ** -FINEST_POSITION[grid.bit_width <= 8]
        scale = power_of_two(step).clamp(finest, (power_of_two(largest) / 2).item())
    else:
        scale = torch.where(step == 0, 1.0, step.clamp(SMALLEST_SCALE, largest.item()))
    if grid.symmetric:
        return QParams(scale.float(), torch.zeros_like(scale, dtype=torch.int32))
    zero_point = grid.quant_min - torch.round(low.double().clamp(max=0) / scale)
    return QParams(scale.float(), zero_point.clamp(grid.quant_min, grid.quant_max).to(torch.int32))


def qparams_from_range(low: Tensor, high: Tensor, grid: Grid) -> QParams:
    """Return scale and zero point for values in [low, high]: tensors of one shape, () or (C,), finite.

    >>> asymmetric = Grid(0, 255, symmetric=False)
    >>> qparams = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.55), asymmetric)
    >>> round(qparams.scale.item(), 6), qparams.zero_point.item()
    (0.01, 100)
    """
    return qparams_from_step(step_from_range(low, high, grid), low, grid)
