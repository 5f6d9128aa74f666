"""Onto codes and back in one step: integers and scaled floating-point formats. Finds no scales,
gives no gradients.

q = clip(round(x / scale) + zero_point, quant_min, quant_max) and x' = (q - zero_point) * scale,
as QuantizeLinear and DequantizeLinear of ONNX define them: a division, because x * (1 / scale)
gives other codes at half-way points.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, fill, scratch, workspace
from quantizer.numerics.formats import cast_round_trip_, format_named
from quantizer.numerics.registry import lookup
from quantizer.numerics.rounding import ROUND_MODES


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
    *,
    inplace: bool = False,
) -> Tensor:
    """Return the quantized and dequantized values of `x`: in its own memory and as `x` if
    `inplace`, else beside it.

    Args:
        x: floating point, of any shape and layout; NaN stays NaN. float16 and bfloat16 are
            computed in float32, more than 2^24 codes in float64.
        scale: float32 (), or (C,) with C the size of dimension `ch_axis`.
        zero_point: int32, same shape.
        quant_min, quant_max: the least and the greatest code.
        round_mode: a key of `ROUND_MODES`.
        ch_axis: the dimension of `x` that scales go with.
        inplace: overwrite `x`.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: there is no such mode, or a shape does not fit.

    >>> x = torch.tensor([-9.0, -0.25, 0.25, 0.74, 9.0])
    >>> fake_quantize(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_up").tolist()
    [-4.0, -0.0, 0.5, 0.5, 3.5]
    """
    # A trace would write out the loop over blocks, for one size
    if torch.compiler.is_compiling():
        return fake_quantize_plain(
            x, scale, zero_point, quant_min, quant_max, round_mode, ch_axis
        )
    kernel, least = (
        integer_kernel(quant_min, quant_max, round_mode),
        work_dtype(quant_min, quant_max),
    )
    return _in_blocks(x, scale, zero_point, kernel, ch_axis, least, inplace)


def fake_cast(
    x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None, *, inplace: bool = False
) -> Tensor:
    """Return scale times the nearest value of the format `name` to x / scale; the rest is as in
    `fake_quantize`.

    >>> fake_cast(torch.tensor([-9.0, 0.3, 0.5]), torch.tensor(0.5), "fp4").tolist()
    [-3.0, 0.25, 0.5]
    """
    if torch.compiler.is_compiling():
        return fake_cast_plain(x, scale, name, ch_axis)
    # Takes no memory
    none = torch.zeros((), dtype=torch.int32, device=scale.device).expand(scale.shape)
    return _in_blocks(x, scale, none, float_kernel(name), ch_axis, torch.float32, inplace)


def _in_blocks(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    kernel: Kernel,
    ch_axis: int | None,
    least: torch.dtype,
    inplace: bool,
) -> Tensor:
    work = workspace(x, least)
    out = torch.empty_like(work) if work is x and not inplace else work
    fill(out, work, scale, zero_point, kernel, ch_axis)
    return out.to(x.dtype) if not inplace or out is x else x.copy_(out)


def fake_quantize_plain(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the same values as `fake_quantize`, bit for bit, by a few operators on the whole
    tensor.

    It needs about three times the memory.

    Raises:
        ValueError: there is no such mode.
    """
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")
    work = torch.promote_types(x.dtype, work_dtype(quant_min, quant_max))
    s, z = (_along(x, values.to(work), ch_axis) for values in (scale, zero_point))
    return (mode((x.to(work) / s).clamp(quant_min - z, quant_max - z)) * s).to(x.dtype)


def fake_cast_plain(x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None) -> Tensor:
    """Return the same values as `fake_cast`, as `fake_quantize_plain` does."""
    s = _along(x, scale.to(torch.promote_types(x.dtype, torch.float32)), ch_axis)
    return (cast_round_trip_(x.to(s.dtype) / s, name) * s).to(x.dtype)


def _along(x: Tensor, values: Tensor, ch_axis: int | None) -> Tensor:
    """Values of an axis of `x`, or one for all of it, in a shape that goes with it."""
    return (
        values
        if ch_axis is None
        else values.view([-1 if axis == ch_axis % x.ndim else 1 for axis in range(x.ndim)])
    )


def integer_kernel(quant_min: int, quant_max: int, round_mode: str) -> Kernel:
    """Return what makes codes of x / scale.

    It clips before it rounds: between integers the result is the same, and every mode stays in
    its exact range.

    Raises:
        ValueError: there is no such mode.

    >>> integer_kernel(-8, 7, "half_up")(0)(torch.tensor([-9.5, 0.5, 9.5])).tolist()
    [-8.0, 1.0, 7.0]
    """
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")

    def kernel(zero_point: int | Tensor) -> Callable[[Tensor], Tensor]:
        if isinstance(zero_point, int):
            least, most = quant_min - zero_point, quant_max - zero_point
            return lambda x: mode(x.clamp_(least, most))
        low, high = quant_min - zero_point, quant_max - zero_point
        # Nine times as fast as clamp_
        return lambda x: mode(torch.minimum(torch.maximum(x, low, out=x), high, out=x))

    return kernel


def float_kernel(name: str) -> Kernel:
    """Return what puts x / scale on the values of a format without zero points.

    Raises:
        ValueError: there is no such format.
    """
    format_named(name)
    return lambda zero_point: lambda x: cast_round_trip_(x, name, scratch(x))


def work_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the narrowest dtype that holds every code and half-way point: float64 from 2^24
    codes on.
    """
    return torch.float64 if quant_max - quant_min >= 1 << 24 else torch.float32
