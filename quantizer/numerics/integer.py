"""The integer arithmetic of the DPU: shifts with rounding, int32 accumulators, division by
multiplication and shift. Also the pairs of products that x86 processors add up in 16 bits.

Codes of the DPU are integers held in float64, which is exact below 2^53 and has fast
convolutions.
"""

import math

import torch
from torch import Tensor

from quantizer.numerics.rounding import rounding_named

INT32_BOUND = 1 << 31
LEAKY_SLOPE = (26, 8)
"""The slope of LeakyReLU for negative values, as multiplier and shift: 26 / 2^8."""
SIXTH = (2731, 14)
"""One sixth as multiplier and shift: hardsigmoid(x) is relu6(x + 3) * 2731 / 2^14."""
LARGEST_PAIR_SUM = 128
"""The largest sum of two weights w for which 255 * w fits 16 bits: 255 * 128 = 32640."""
HARDSWISH_POSITION = 7
"""In hardswish, hardsigmoid(x) is an 8-bit code at this position, rounded half_up, before it is
multiplied by x.
"""
_POOLING = {
    (3, 3): (7, 6),
    (5, 5): (10, 8),
    (6, 6): (7, 8),
    (3, 6): (14, 8),
    (6, 3): (14, 8),
    (7, 7): (21, 10),
    (14, 14): (21, 12),
}


def requantize(
    codes: Tensor, shift: int, quant_min: int, quant_max: int, *, round_mode: str
) -> Tensor:
    """Return `codes` / 2^shift, rounded and clipped to codes, as float64. A negative shift goes
    to the left.

    Raises:
        ValueError: there is no such rounding mode.

    >>> import torch
    >>> codes = torch.tensor([-6.0, -5.0, 6.0, 9000.0])
    >>> requantize(codes, 2, -128, 127, round_mode="half_up").tolist()
    [-1.0, -1.0, 2.0, 127.0]
    """
    mode = rounding_named(round_mode)
    return mode(codes.double() * 2.0**-shift).clamp_(quant_min, quant_max)


def wrap_int32(accumulator: Tensor) -> Tensor:
    """Return what an int32 register holds of each integer. Only an overflow changes it.

    >>> import torch
    >>> wrap_int32(torch.tensor([5.0, 2.0**31], dtype=torch.float64)).tolist()
    [5.0, -2147483648.0]
    """
    return (accumulator + INT32_BOUND).remainder_(2 * INT32_BOUND).sub_(INT32_BOUND)


def pooling_factor(height: int, width: int) -> tuple[int, int]:
    """Return (m, s) so that an average over a window is its sum times m / 2^s, as the DPU
    computes it.

    A few windows have a factor of their own. The others take the best m = round(2^s / area) for
    s below log2(128 area), the first of equal ones. The relative error is at most 2.4 %, at
    5x5.

    Source: pytorch_nndct 3.5, the average pooling of Vitis AI.

    >>> pooling_factor(7, 7), pooling_factor(2, 2), pooling_factor(9, 9)
    ((21, 10), (1, 2), (101, 13))
    """
    if (height, width) in _POOLING:
        return _POOLING[height, width]
    area = height * width
    shifts = range(math.ceil(math.log2(128 * area)))
    factors = [(round(2**shift / area), shift) for shift in shifts]
    return min(factors, key=lambda factor: abs(factor[0] / 2 ** factor[1] - 1 / area))


def largest_pair_sums(weights: Tensor) -> Tensor:
    """Return for each output the largest magnitude of the sum of two weights whose products are
    added first, (outputs,).

    These are neighbours along the input channels, which the kernels order within each position
    of a convolution's kernel. Two weights of opposite signs cannot saturate. They count with
    the larger magnitude.

    Args:
        weights: [outputs, inputs, ...], floats or codes.

    >>> largest_pair_sums(torch.tensor([[100, 28, -90, 127], [0, -3, 2, 2]])).tolist()
    [128, 4]
    """
    if weights.dtype in (torch.int8, torch.uint8):
        weights = weights.to(torch.int32)
    outputs, inputs = weights.shape[:2]
    by_position = weights.reshape(outputs, inputs, -1).transpose(1, 2)
    rows = by_position.reshape(outputs, -1)
    # The kernels fill up the last pair with a zero.
    missing = rows.shape[1] % 2
    rows = torch.nn.functional.pad(rows, (0, missing))
    pairs = rows.reshape(outputs, -1, 2)
    positive_sums = pairs.clamp(min=0).sum(2)
    negative_sums = pairs.clamp(max=0).sum(2)
    return torch.maximum(positive_sums.amax(1), -negative_sums.amin(1))
