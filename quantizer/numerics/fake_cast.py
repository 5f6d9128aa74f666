"""Onto a scaled floating-point format and back: y = cast(clamp(x / scale)) * scale. Finds no scales, no gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, fill, scratch, workspace
from quantizer.numerics.formats import cast_round_trip_, format_named


def fake_cast_(x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None) -> Tensor:
    """Replace `x` by scale times the nearest value of the format `name` to x / scale, in place, and return it.

    `x` is floating point of any shape and layout; float16 and bfloat16 are computed in float32. `scale` (float32) has
    shape (), or (C,) with `ch_axis` the dimension of size C. NaN stays NaN. Raises TypeError if `x` is not floating
    point, ValueError for an unknown format or a shape that does not fit.

    >>> fake_cast_(torch.tensor([-9.0, 0.3, 0.5]), torch.tensor(0.5), "fp4").tolist()
    [-3.0, 0.25, 0.5]
    """
    work = workspace(x)
    fill(work, work, scale, _no_zero_point(scale), float_kernel(name), ch_axis)
    return x if work is x else x.copy_(work)


def fake_cast(x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None) -> Tensor:
    """Return the values of `fake_cast_`; `x` stays as it is."""
    work, kernel = workspace(x), float_kernel(name)
    out = torch.empty_like(work) if work is x else work
    return fill(out, work, scale, _no_zero_point(scale), kernel, ch_axis).to(x.dtype)


def fake_cast_plain(x: Tensor, scale: Tensor, name: str, ch_axis: int | None = None) -> Tensor:
    """Return the same values as `fake_cast` by a few operators on the whole tensor, for programs that torch traces.

    >>> fake_cast_plain(torch.tensor([-9.0, 0.3, 0.5]), torch.tensor(0.5), "fp4").tolist()
    [-3.0, 0.25, 0.5]
    """
    s = scale.to(torch.promote_types(x.dtype, torch.float32))
    if ch_axis is not None:
        shape = [1] * x.ndim
        shape[ch_axis] = -1
        s = s.view(shape)
    return (cast_round_trip_(x.to(s.dtype) / s, name) * s).to(x.dtype)


def float_kernel(name: str) -> Kernel:
    """Return what puts x / scale on the values of the format `name`. Raises ValueError for an unknown name."""
    format_named(name)
    return partial(_cast, name)


def _cast(name: str, x: Tensor, zero_point: int | Tensor) -> Tensor:
    """Float formats have no zero point."""
    return cast_round_trip_(x, name, scratch(x))


def _no_zero_point(scale: Tensor) -> Tensor:
    """Zeros in the shape of `scale` that need no memory."""
    return torch.zeros((), dtype=torch.int32, device=scale.device).expand(scale.shape)
