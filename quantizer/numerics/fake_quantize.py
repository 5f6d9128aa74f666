"""Integer codes and back in one step: fake_quantize, in place or not. Finds no scales, gives no gradients.

q = clip(round(x / scale) + zero_point, quant_min, quant_max) and x' = (q - zero_point) * scale, as QuantizeLinear and
DequantizeLinear of ONNX define them: a division, because x * (1 / scale) gives other codes at half-way points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, fill, workspace
from quantizer.numerics.registry import lookup
from quantizer.numerics.rounding import ROUND_MODES


def fake_quantize_(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Replace `x` by its quantized and dequantized values, in place, and return it.

    `x` is floating point of any shape and layout; float16 and bfloat16 are computed in float32, more than 2^24
    codes in float64. `scale` (float32) and `zero_point` (int32) have shape (), or (C,) with `ch_axis` the dimension of
    size C. NaN stays NaN. Raises TypeError if `x` is not floating point, ValueError for an unknown mode or a shape that
    does not fit.

    >>> x = torch.tensor([-9.0, -0.25, 0.25, 0.74, 9.0])
    >>> fake_quantize_(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_up").tolist()
    [-4.0, -0.0, 0.5, 0.5, 3.5]
    """
    work = workspace(x, work_dtype(quant_min, quant_max))
    fill(work, work, scale, zero_point, integer_kernel(quant_min, quant_max, round_mode), ch_axis)
    return x if work is x else x.copy_(work)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the quantized and dequantized values of `x`, which stays as it is; see `fake_quantize_`."""
    work, kernel = workspace(x, work_dtype(quant_min, quant_max)), integer_kernel(quant_min, quant_max, round_mode)
    out = torch.empty_like(work) if work is x else work
    return fill(out, work, scale, zero_point, kernel, ch_axis).to(x.dtype)


def fake_quantize_plain(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the same values as `fake_quantize`, bit for bit, by a few operators on the whole tensor.

    For programs that torch traces, where a loop over blocks would be written out for one size; it needs about three
    times the memory. Raises ValueError for an unknown mode.

    >>> x = torch.tensor([-9.0, -0.25, 0.25, 0.74, 9.0])
    >>> fake_quantize_plain(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_up").tolist()
    [-4.0, -0.0, 0.5, 0.5, 3.5]
    """
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")
    work = torch.promote_types(x.dtype, work_dtype(quant_min, quant_max))
    s, z = scale.to(work), zero_point.to(work)
    if ch_axis is not None:
        shape = [1] * x.ndim
        shape[ch_axis] = -1
        s, z = s.view(shape), z.view(shape)
    return (mode((x.to(work) / s).clamp(quant_min - z, quant_max - z)) * s).to(x.dtype)


def integer_kernel(quant_min: int, quant_max: int, round_mode: str) -> Kernel:
    """Return what makes codes of x / scale. Raises ValueError for an unknown mode.

    It clips before it rounds: between integers the result is the same, and every mode stays in its exact range.

    >>> integer_kernel(-8, 7, "half_up")(torch.tensor([-9.5, 0.5, 9.5]), 0).tolist()
    [-8.0, 1.0, 7.0]
    """
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")

    def kernel(x: Tensor, zero_point: int | Tensor) -> Tensor:
        if isinstance(zero_point, int):
            return mode(x.clamp_(quant_min - zero_point, quant_max - zero_point))
        torch.maximum(x, quant_min - zero_point, out=x)  # clamp_ with tensors is nine times slower
        return mode(torch.minimum(x, quant_max - zero_point, out=x))

    return kernel


def work_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the narrowest dtype that holds every code and half-way point: float64 from 2^24 codes on."""
    return torch.float64 if quant_max - quant_min >= 1 << 24 else torch.float32
