"""Onto the grid and back: fake_quantize in place, quantize to codes, dequantize. Finds no scales, gives no gradients.

q = clip(round(x / scale) + zero_point, quant_min, quant_max) and x' = (q - zero_point) * scale, as QuantizeLinear and
DequantizeLinear of ONNX define them: a division, because x * (1 / scale) gives other codes at half-way points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from quantizer.numerics.layout import flat_view, memory_order
from quantizer.numerics.registry import lookup
from quantizer.numerics.rounding import ROUND_MODES

BLOCK = 1 << 18  # values per step: 1 MB of float32 stays in the cache for all operations of the step


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

    `x` is floating point of any shape and layout; float16 and bfloat16 are computed in float32, grids beyond 2^24
    codes in float64. `scale` (float32) and `zero_point` (int32) have shape (), or (C,) with `ch_axis` the dimension of
    size C. NaN stays NaN. Raises TypeError if `x` is not floating point, ValueError for an unknown mode or a shape that
    does not fit.

    >>> x = torch.tensor([-9.0, -0.25, 0.25, 0.74, 9.0])
    >>> fake_quantize_(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_up").tolist()
    [-4.0, -0.0, 0.5, 0.5, 3.5]
    """
    work = _workspace(x, quant_max - quant_min)
    _fill(work, work, scale, zero_point, (quant_min, quant_max, round_mode), ch_axis)
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
    work = _workspace(x, quant_max - quant_min)
    out = torch.empty_like(work) if work is x else work
    return _fill(out, work, scale, zero_point, (quant_min, quant_max, round_mode), ch_axis).to(x.dtype)


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
    work = torch.float64 if x.dtype == torch.float64 or quant_max - quant_min >= 1 << 24 else torch.float32
    s, z = scale.to(work), zero_point.to(work)
    if ch_axis is not None:
        shape = [1] * x.ndim
        shape[ch_axis] = -1
        s, z = s.view(shape), z.view(shape)
    return (mode((x.to(work) / s).clamp(quant_min - z, quant_max - z)) * s).to(x.dtype)


def quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    round_mode: str,
    ch_axis: int | None = None,
) -> Tensor:
    """Return the codes of `x` in the smallest integer dtype that holds the grid; arguments as for `fake_quantize_`.

    Raises ValueError if `x` holds NaN, which has no code.

    >>> quantize(torch.tensor([-9.0, 0.74]), torch.tensor(0.5), torch.tensor(3), 0, 15, "half_even")
    tensor([0, 4], dtype=torch.uint8)
    """
    _check(x, scale, zero_point, ch_axis)
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")
    work = _workspace(x.clone(), quant_max - quant_min)
    for block, s, z in _blocks(work, scale, zero_point, ch_axis):
        mode(_clip_(block.div_(s), quant_min - z, quant_max - z)).add_(z)
    if work.isnan().any():
        raise ValueError(f"{int(work.isnan().sum())} of {work.numel()} values are NaN and have no code.")
    return work.to(code_dtype(quant_min, quant_max))


def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor, ch_axis: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (codes - zero_point) * scale, computed in float64 and rounded to `dtype`; `codes` is any integer tensor.

    >>> dequantize(torch.tensor([0, 4], dtype=torch.uint8), torch.tensor(0.5), torch.tensor(3)).tolist()
    [-1.5, 0.5]
    """
    _check(codes, scale, zero_point, ch_axis)
    shape = [1] * codes.ndim
    if ch_axis is not None:
        shape[ch_axis] = -1
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    return ((codes.double() - zero_point) * scale.double()).to(dtype)


def code_dtype(quant_min: int, quant_max: int) -> torch.dtype:
    """Return the smallest integer dtype that holds a grid, but not uint16, in which torch can compute little.

    >>> code_dtype(-8, 7), code_dtype(0, 255), code_dtype(0, 65535)
    (torch.int8, torch.uint8, torch.int32)
    """
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        info = torch.iinfo(dtype)
        if info.min <= quant_min and quant_max <= info.max:
            return dtype
    return torch.int64


def _check(x: Tensor, scale: Tensor, zero_point: Tensor, ch_axis: int | None) -> None:
    shape = () if ch_axis is None else (x.shape[ch_axis],)
    if scale.shape != shape or zero_point.shape != shape:
        raise ValueError(
            f"For a tensor of shape {tuple(x.shape)} with ch_axis {ch_axis}, scale and zero_point must have shape "
            f"{shape}, not {tuple(scale.shape)} and {tuple(zero_point.shape)}."
        )


def _workspace(x: Tensor, codes: int) -> Tensor:
    """Return `x`, or a copy where its dtype cannot hold every code and half-way point or its memory has gaps."""
    if not x.is_floating_point():
        raise TypeError(f"Only floating-point tensors can be quantized, not {x.dtype}.")
    if codes >= 1 << 24:
        x = x.double()
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    return x.contiguous() if flat_view(x) is None else x


def _fill(
    out: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: tuple[int, int, str], ch_axis: int | None
) -> Tensor:
    """Write the quantized and dequantized `x` to `out`, of its layout, which may be `x` itself, and return `out`."""
    _check(x, scale, zero_point, ch_axis)
    quant_min, quant_max, round_mode = grid
    mode = lookup(ROUND_MODES, round_mode, "rounding mode")
    targets = _blocks(out, scale, zero_point, ch_axis)
    for (source, s, z), (target, _, _) in zip(_blocks(x, scale, zero_point, ch_axis), targets, strict=True):
        mode(_clip_(torch.div(source, s, out=target), quant_min - z, quant_max - z)).mul_(s)
    return out


def _clip_(x: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Clip, before rounding: between integers the result is the same, and every mode stays in its exact range."""
    return x.clamp_(low, high)  # type: ignore[arg-type]


def _blocks(
    x: Tensor, scale: Tensor, zero_point: Tensor, ch_axis: int | None
) -> Iterator[tuple[Tensor, Tensor, int | Tensor]]:
    """Yield views of about BLOCK values that cover `x`, in memory order, each with the scale and zero point for it."""
    scale, order = scale.to(x), memory_order(x)
    if ch_axis is None:
        z, flat = int(zero_point), x.permute(order).view(-1)
        yield from ((flat[start : start + BLOCK], scale, z) for start in range(0, flat.numel(), BLOCK))
        return
    axis = order.index(ch_axis % x.ndim)
    ordered = x.permute(order)
    channels, inner = ordered.shape[axis], math.prod(ordered.shape[axis + 1 :])
    rows = ordered.view(math.prod(ordered.shape[:axis]), channels, inner)
    zero_points = zero_point.to(x).view(1, -1, 1) if zero_point.any() else None
    scales = scale.view(1, -1, 1)
    wide = max(1, min(channels, BLOCK // max(1, inner)))
    tall = max(1, BLOCK // max(1, wide * inner))
    for start, c in product(range(0, len(rows), tall), range(0, channels, wide)):
        here = slice(c, c + wide)
        yield rows[start : start + tall, here], scales[:, here], 0 if zero_points is None else zero_points[:, here]
