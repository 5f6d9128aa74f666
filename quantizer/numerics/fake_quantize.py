"""Quantize to codes and back in one step: integers and scaled floating-point formats. No
gradients.

q = clip(round(x / scale) + zero_point, quant_min, quant_max) and x' = (q - zero_point) * scale,
as QuantizeLinear and DequantizeLinear of ONNX define them. It is a division: x * (1 / scale)
gives other codes at half-way points.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, Rounder, along_axis, fill, scratch, workspace
from quantizer.numerics.formats import cast_round_trip_, format_named
from quantizer.numerics.rounding import RoundMode, rounding_named
from quantizer.storage.deferred_tensor import DeferredTensor


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
    inplace: bool = False,
) -> Tensor:
    """Return the quantized and dequantized values of `x`.

    Args:
        x: floating point, of any shape and layout; NaN stays NaN. float16 and bfloat16 are
            computed in float32, more than 2^24 codes in float64.
        scale: float32 (), or (C,) with C the size of dimension `ch_axis`.
        zero_point: int32, same shape.
        quant_min, quant_max: the least and the greatest code.
        round_mode: a key of `ROUND_MODES`.
        ch_axis: the dimension of `x` that scales go with.
        inplace: overwrite `x` and return it.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: there is no such mode, or a shape does not fit.

    >>> x = torch.tensor([-9.0, -0.25, 0.25, 0.74, 9.0])
    >>> int4 = {"quant_min": -8, "quant_max": 7, "round_mode": "half_up"}
    >>> fake_quantize(x, torch.tensor(0.5), torch.tensor(0), **int4).tolist()
    [-4.0, -0.0, 0.5, 0.5, 3.5]
    """
    # A trace would unroll the loop over blocks for one size
    if torch.compiler.is_compiling():
        return fake_quantize_plain(
            x,
            scale,
            zero_point,
            quant_min=quant_min,
            quant_max=quant_max,
            round_mode=round_mode,
            ch_axis=ch_axis,
        )
    return _in_blocks(
        x,
        IntegerKernel.of(quant_min, quant_max, round_mode),
        scale=scale,
        zero_point=zero_point,
        ch_axis=ch_axis,
        least=work_dtype(quant_min, quant_max),
        inplace=inplace,
    )


def fake_cast(
    x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None, *, inplace: bool = False
) -> Tensor:
    """Return scale times the nearest value of the format `name` to x / scale. Everything else
    is as in `fake_quantize`.

    >>> fake_cast(torch.tensor([-9.0, 0.3, 0.5]), torch.tensor(0.5), "fp4").tolist()
    [-3.0, 0.25, 0.5]
    """
    if torch.compiler.is_compiling():
        return fake_cast_plain(x, scale, name, ch_axis)
    # An expanded zero takes no memory
    zero = torch.zeros((), dtype=torch.int32, device=scale.device).expand(scale.shape)
    return _in_blocks(
        x,
        FloatKernel.of(name),
        scale=scale,
        zero_point=zero,
        ch_axis=ch_axis,
        least=torch.float32,
        inplace=inplace,
    )


def _in_blocks(
    x: Tensor,
    kernel: Kernel,
    *,
    scale: Tensor,
    zero_point: Tensor,
    ch_axis: int | None,
    least: torch.dtype,
    inplace: bool,
) -> Tensor:
    """Return the values of `x` after a kernel, computed in `least` or a wider dtype."""
    if isinstance(x, DeferredTensor):
        # Otherwise `work` may be the loaded tensor, which others keep, and pass for a copy
        x = x.load()
    work = workspace(x, least)
    out = torch.empty_like(work) if work is x and not inplace else work
    fill(out, work, kernel, scale=scale, zero_point=zero_point, ch_axis=ch_axis)
    if inplace and out is not x:
        return x.copy_(out)
    return out.to(x.dtype)


def fake_quantize_plain(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the same values as `fake_quantize`, bit for bit, with a few operators on the whole
    tensor.

    This needs about three times the memory.

    Raises:
        ValueError: there is no such mode.
    """
    mode = rounding_named(round_mode)
    work = torch.promote_types(x.dtype, work_dtype(quant_min, quant_max))
    step = along_axis(scale.to(work), x, ch_axis)
    zero = along_axis(zero_point.to(work), x, ch_axis)
    codes = mode((x.to(work) / step).clamp(quant_min - zero, quant_max - zero))
    return (codes * step).to(x.dtype)


def fake_cast_plain(x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None) -> Tensor:
    """Return the same values as `fake_cast`, as `fake_quantize_plain` does."""
    work = torch.promote_types(x.dtype, torch.float32)
    step = along_axis(scale.to(work), x, ch_axis)
    return (cast_round_trip_(x.to(work) / step, name) * step).to(x.dtype)


@dataclass(frozen=True)
class IntegerKernel:
    """Makes integer codes of x / scale.

    It clips before it rounds: between integers the result is the same, and every mode stays in
    its exact range.

    >>> round_ = IntegerKernel.of(-8, 7, "half_up").rounder(0)
    >>> round_(torch.tensor([-9.5, 0.5, 9.5])).tolist()
    [-8.0, 1.0, 7.0]
    """

    quant_min: int
    quant_max: int
    mode: RoundMode

    @staticmethod
    @cache
    def of(quant_min: int, quant_max: int, round_mode: str) -> "IntegerKernel":
        """Return the kernel of a range of codes and a key of `ROUND_MODES`.

        Raises:
            ValueError: there is no such mode.
        """
        return IntegerKernel(quant_min, quant_max, rounding_named(round_mode))

    def rounder(self, zero_point: int | Tensor) -> Rounder:
        """Return what clips and rounds for one zero point."""
        mode = self.mode
        if isinstance(zero_point, int):
            least = self.quant_min - zero_point
            greatest = self.quant_max - zero_point
            return lambda x: mode(x.clamp_(least, greatest))
        low = self.quant_min - zero_point
        high = self.quant_max - zero_point

        def clip_and_round(x: Tensor) -> Tensor:
            # Nine times as fast as clamp_
            torch.maximum(x, low, out=x)
            torch.minimum(x, high, out=x)
            return mode(x)

        return clip_and_round


@dataclass(frozen=True)
class FloatKernel:
    """Rounds x / scale to the values of a format, which has no zero points."""

    name: str

    @staticmethod
    @cache
    def of(name: str) -> "FloatKernel":
        """Return the kernel of a format.

        Raises:
            ValueError: there is no such format.
        """
        format_named(name)
        return FloatKernel(name)

    def rounder(self, zero_point: int | Tensor) -> Rounder:
        """Return what rounds; zero points are all 0."""
        return lambda x: cast_round_trip_(x, self.name, scratch(x))


def work_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the narrowest dtype that holds every code and half-way point. With 2^24 codes or
    more this is float64.
    """
    return torch.float64 if quant_max - quant_min >= 1 << 24 else torch.float32
