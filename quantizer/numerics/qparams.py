"""Compute scale and zero point from a range of real values, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.formats import (
    POWERS_OF_TWO,
    SHARED_EXPONENTS,
    SMALLEST_SCALE,
    CodeRange,
    FloatRange,
    IntegerRange,
)

_LARGEST_VALUE = 2.0**128 - 2.0**105
"""The limit of a code times its scale. It is one step less than the largest float32, because
the scale may be rounded up to float32.
"""
_FLOAT64_BITS = 52
_FLOAT64_MANTISSA = (1 << _FLOAT64_BITS) - 1


@dataclass(frozen=True)
class QParams:
    """The `scale` float32 and the `zero_point` int32, both of one shape: () for a tensor, (C,)
    for its channels or rows. For formats with a minimum, that is the zero point, as float32.
    """

    scale: Tensor
    zero_point: Tensor

    def to(self, device: torch.device) -> QParams:
        """Return the same on a device. Ranges are computed on the CPU."""
        return QParams(self.scale.to(device), self.zero_point.to(device))


def power_of_two(step: Tensor) -> Tensor:
    """Return the smallest power of two that is at least each `step`; 0 stays 0.

    `step` is float64, and each value is 0 or normal.

    >>> power_of_two(torch.tensor([0.0, 0.25, 0.26, 3.0], dtype=torch.float64)).tolist()
    [0.0, 0.25, 0.5, 4.0]
    """
    # Adding the largest mantissa carries into the exponent unless the mantissa is 0
    return _truncate_(step.clone(), _FLOAT64_MANTISSA)


def step_from_range(low: Tensor, high: Tensor, code_range: CodeRange) -> Tensor:
    """Return the distance between two codes, float64, that makes [low, high] fit the codes.

    The range is first extended to contain 0. The step is 0 for a range of 0 alone.

    - Symmetric float step: it puts the largest magnitude on quant_max, or half a step above it
      with the rule "half_range". With the rule "quant_min" it puts the value of the largest
      magnitude on quant_min, and the step of a positive value is negative.
    - Asymmetric step, or that of a format with a minimum: it puts the ends of the range on the
      least and the greatest code.
    - Symmetric power-of-two step: it is the finest one that clips at most half a step, with
      2^-fp >= max(low / (quant_min - 0.5), high / (quant_max + 0.5)).
    - For a FloatRange see its docstring.

    Source: the fix position of pytorch_nndct 3.5.

    >>> code_range = IntegerRange(-128, 127, scale_type="poweroftwo")
    >>> step_from_range(torch.tensor(-1.0), torch.tensor(0.5), code_range).item()
    0.0078125
    >>> step_from_range(torch.tensor(-7.0), torch.tensor(0.5), FloatRange("fp4", "e8m0")).item()
    1.0
    >>> code_range = IntegerRange(-8, 7, symmetric_scale="half_range")
    >>> step_from_range(torch.tensor(-1.0), torch.tensor(15.0), code_range).item()
    2.0
    """
    if isinstance(code_range, FloatRange) and code_range.scale_type in SHARED_EXPONENTS:
        step = _truncate_(_amax(low, high), _carry(code_range))
        step.mul_(2.0**-code_range.row.emax)
        # Only scales of few bits need it
        from quantizer.numerics.two_level import with_microexponents

        return step if code_range.scale_type == "e8m0" else with_microexponents(step)
    if not code_range.symmetric or _has_minimum(code_range):
        step = high.clamp(min=0).double().sub_(low.clamp(max=0)).div_(code_range.span)
    elif isinstance(code_range, IntegerRange) and code_range.scale_type == "poweroftwo":
        for_low = low.double() / (code_range.quant_min - 0.5)
        for_high = high.double() / (code_range.quant_max + 0.5)
        step = torch.maximum(for_low, for_high).clamp_(min=0)
    else:
        step = symmetric_step(_amax(low, high), code_range)
        if code_range.has_signed_scale:
            step = torch.where(high > -low, -step, step)
    if code_range.scale_type == "poweroftwo":
        _truncate_(step, _FLOAT64_MANTISSA)
    return step


def symmetric_step(amax: Tensor, code_range: CodeRange) -> Tensor:
    """Return the distance between two codes, as a float, for magnitudes of at most `amax`.

    >>> code_range = IntegerRange(-8, 7, symmetric_scale="half_range")
    >>> symmetric_step(torch.tensor(7.5), code_range).item()
    1.0
    """
    return amax / code_range.largest


def uncut(code_range: CodeRange) -> float:
    """Return the factor from the scale of the symmetric rule to the scale that clips nothing.

    It is at least 1, and more than 1 only with the rule "half_range". Searches try that scale
    as well.

    >>> uncut(IntegerRange(-2, 1, symmetric_scale="half_range")), uncut(IntegerRange(-2, 1))
    (1.5, 1.0)
    """
    if code_range.has_signed_scale:
        return 1.0
    is_float = code_range.symmetric and code_range.scale_type == "float"
    if isinstance(code_range, IntegerRange) and is_float:
        return code_range.largest / code_range.quant_max
    return 1.0


def qparams_from_step(step: Tensor, low: Tensor, code_range: CodeRange) -> QParams:
    """Return the scale for `step` and the zero point that puts `low` on quant_min.

    A scale is the step itself, or if it must be a power of two, the smallest that is not less.
    Scales are in [2^-126, largest float32 / largest code], so that neither 1 / scale nor a code
    times the scale is infinite. With signed scales this holds for their magnitudes. Shared
    exponents are at least -127. A step of 0 means that all
    values are 0. It gives the scale 1, or the finest power of two if a device limits that.

    The zero point is rounded to even and clipped to the codes. It is 0 for symmetric codes.

    Args:
        step: float64, negative only for signed scales. For scales of type "e4m3", the steps of
            all groups of one tensor.
        low: float64 of the same shape.
        code_range: the codes.
    """
    if code_range.scale_type in POWERS_OF_TWO:
        step = power_of_two(step)
    return _qparams(step, low, code_range)


def _qparams(step: Tensor, low: Tensor, code_range: CodeRange) -> QParams:
    """Return the qparams for a step that the scale type allows."""
    if isinstance(code_range, FloatRange) and code_range.scale_type == "superblock":
        return _superblock_qparams(step, low, code_range)
    if not code_range.has_signed_scale:
        return _unsigned_qparams(step, low, code_range)
    qparams = _unsigned_qparams(step.abs(), low, code_range)
    signed_scale = torch.where(step < 0, -qparams.scale, qparams.scale)
    return QParams(signed_scale, qparams.zero_point)


def _superblock_qparams(step: Tensor, low: Tensor, code_range: FloatRange) -> QParams:
    """Return the nearest scales and minima that super-blocks hold."""
    # Only super-blocks need it
    from quantizer.numerics.superblocks import SUPERBLOCKS, nearest_in_superblocks

    layout = SUPERBLOCKS[code_range.dtype]
    scale = nearest_in_superblocks(step, layout.scales, layout.groups).float()
    if layout.minima is None:
        return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
    minimum = -low.double().clamp(max=0)
    minimum = nearest_in_superblocks(minimum, layout.minima, layout.groups)
    return QParams(scale, minimum.float())


def _unsigned_qparams(step: Tensor, low: Tensor, code_range: CodeRange) -> QParams:
    """Return the qparams for a step of at least 0."""
    least, largest = _scale_bounds(code_range)
    shared_step = None
    if isinstance(code_range, FloatRange):
        shared_step = code_range.shared_step
    if code_range.scale_type == "e4m3":
        steps = step if shared_step is None else step.clamp(min=shared_step)
        # Only scales of few bits need it
        from quantizer.numerics.two_level import global_scale_of, with_global_scale

        scale = with_global_scale(step.clamp(max=largest), global_scale_of(steps)).double()
    else:
        if shared_step is not None:
            step = torch.full_like(step, shared_step)
        scale = step.clamp(least, largest)
        is_limited = getattr(code_range, "finest_position", None) is not None
        zeros_scale = least if is_limited else 1.0
        if isinstance(code_range, FloatRange) and not code_range.has_zero:
            # Only super-blocks need it
            from quantizer.numerics.superblocks import LEAST_FACTOR

            zeros_scale = LEAST_FACTOR
        scale.masked_fill_(step == 0, zeros_scale)
    if _has_minimum(code_range):
        return QParams(scale.float(), -low.float().clamp(max=0))
    if code_range.symmetric or isinstance(code_range, FloatRange):
        return QParams(scale.float(), torch.zeros_like(scale, dtype=torch.int32))
    zero_point = code_range.quant_min - torch.round(low.double().clamp(max=0) / scale)
    zero_point = zero_point.clamp(code_range.quant_min, code_range.quant_max)
    return QParams(scale.float(), zero_point.to(torch.int32))


def _has_minimum(code_range: CodeRange) -> bool:
    return isinstance(code_range, FloatRange) and code_range.row.has_minimum


def _amax(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest magnitude in [low, high], as a new float64 tensor. It is exact in the
    dtype of the two.
    """
    return torch.maximum(-low, high).clamp_(min=0).to(torch.float64, copy=True)


def _carry(code_range: FloatRange) -> int:
    """Return the number to add to the mantissa of a float64. It carries into the exponent if
    the scale mode rounds up.
    """
    if code_range.scale_mode == "ceil":
        return _FLOAT64_MANTISSA
    if code_range.scale_mode == "floor" or code_range.row.mantissa is None:
        return 0
    # Half of the last bit of the format's own mantissa
    return 1 << (_FLOAT64_BITS - 1 - code_range.row.mantissa)


def _truncate_(x: Tensor, carry: int) -> Tensor:
    """Turn `x` into powers of two in place: add `carry` to the mantissa, then set that to 0.

    `x` is float64, and each value is 0 or normal.
    """
    x.view(torch.int64).add_(carry).bitwise_and_(~_FLOAT64_MANTISSA)
    return x


def _scale_bounds(code_range: CodeRange) -> tuple[float, float]:
    """Return the least and the largest scale that is allowed."""
    largest = _LARGEST_VALUE / code_range.span
    if code_range.scale_type not in POWERS_OF_TWO:
        return SMALLEST_SCALE, largest
    # The largest power of two below `largest`
    mantissa, exponent = math.frexp(largest)
    return code_range.finest, 2.0 ** (exponent - 1 - (mantissa == 0.5))


def qparams_from_range(low: Tensor, high: Tensor, code_range: CodeRange) -> QParams:
    """Return scale and zero point for values in [low, high]: tensors of one shape, finite.

    >>> asymmetric = IntegerRange(0, 255, symmetric=False)
    >>> qparams = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.55), asymmetric)
    >>> round(qparams.scale.item(), 6), qparams.zero_point.item()
    (0.01, 100)
    """
    return _qparams(step_from_range(low, high, code_range), low, code_range)
