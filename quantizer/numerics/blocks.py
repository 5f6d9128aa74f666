"""Elementwise work on tensors in cache-sized blocks along memory, each with the scales that it
needs. A kernel does the rounding.
"""

import math
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

# 2 MB of float32 stay in the cache for all operations of a block
BLOCK_SIZE = 1 << 19
# A GPU launches every operation of a block by itself, which small blocks do not pay for
GPU_BLOCK_SIZE = 1 << 24
_thread = threading.local()

Rounder = Callable[[Tensor], Tensor]
"""Replaces x / scale by code - zero_point, as floating point, and returns it."""
Block = tuple[Tensor, Tensor, Tensor, "int | Tensor"]
"""Views of a tensor and of another one of its layout, and their scale and zero point, which
broadcast against the views.
"""


class Kernel(Protocol):
    """Rounds to the codes of one format."""

    def rounder(self, zero_point: int | Tensor) -> Rounder:
        """Return what rounds for one zero point, an integer or a tensor that broadcasts."""


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of `x` from the outermost to the innermost in memory.

    >>> memory_order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    [0, 2, 3, 1]
    """
    return sorted(range(x.ndim), key=lambda axis: -x.stride()[axis])


def flat_view(x: Tensor) -> Tensor | None:
    """Return the elements of `x` as one vector in memory order, sharing its memory, or None if
    there are gaps in it.

    >>> flat_view(torch.arange(6).view(2, 3).T).tolist()
    [0, 1, 2, 3, 4, 5]
    >>> flat_view(torch.arange(6)[::2]) is None
    True
    """
    ordered = x.permute(memory_order(x))
    return ordered.view(-1) if ordered.is_contiguous() else None


def flatten_memory(x: Tensor) -> Tensor:
    """Return the elements of `x` as one vector, in memory order. It is a copy only if the
    memory has gaps.
    """
    flat = flat_view(x)
    return x.reshape(-1) if flat is None else flat


def along_axis(values: Tensor, x: Tensor, ch_axis: int | None) -> Tensor:
    """Return `values`, one for each index of `ch_axis`, in a shape that broadcasts against `x`.

    With `ch_axis` None there is one value for all of `x`.
    """
    if ch_axis is None:
        return values
    shape = [1] * x.ndim
    shape[ch_axis] = -1
    return values.view(shape)


def workspace(x: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """Return `x`, or a copy if its dtype is narrower than `least` or its memory has gaps.

    Raises:
        TypeError: `x` holds integers.
    """
    if not x.is_floating_point():
        raise TypeError(f"Only floating-point tensors can be quantized, not {x.dtype}.")
    x = x.to(torch.promote_types(x.dtype, least))
    return x.contiguous() if flat_view(x) is None else x


def fill(
    out: Tensor,
    x: Tensor,
    kernel: Kernel,
    *,
    scale: Tensor,
    zero_point: Tensor,
    ch_axis: int | None,
) -> Tensor:
    """Write (code - zero_point) * scale for each value of `x` to `out`, and return `out`.

    `out` has the layout of `x`, or is `x`.

    Raises:
        ValueError: scale and zero point have another shape than (), or (C,) with C the size of
            dimension `ch_axis`.
    """
    shape = () if ch_axis is None else (x.shape[ch_axis],)
    if scale.shape != shape or zero_point.shape != shape:
        raise ValueError(
            f"For a tensor of shape {tuple(x.shape)} with ch_axis {ch_axis}, scale and "
            f"zero_point must have shape {shape}, not {tuple(scale.shape)} and "
            f"{tuple(zero_point.shape)}."
        )
    for source, target, step, zero in blocks(x, out, scale, zero_point, ch_axis=ch_axis):
        torch.div(source, step, out=target)
        round_ = kernel.rounder(zero)
        round_(target).mul_(step)
    return out


def _is_zero(zero_point: Tensor) -> bool:
    """Return whether no zero point has to be added. On a GPU it is always false: waiting for
    the values costs more than adding them.
    """
    if zero_point.numel() == 0:
        return True
    if not zero_point.is_cpu:
        return False
    # Many times as fast as `any`
    least, greatest = zero_point.aminmax()
    return int(least) == 0 and int(greatest) == 0


def scratch(x: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return memory of the shape of the block `x` to work in, of its dtype if none is given, or
    None if `x` only stands for a tensor.

    Each thread keeps its memory: what the system hands out anew for every block costs more than
    the work in it.
    """
    if type(x) is not Tensor or x.numel() > 2 * BLOCK_SIZE:
        return None
    buffers: dict[tuple[torch.dtype, torch.device], Tensor]
    buffers = vars(_thread).setdefault("buffers", {})
    key = dtype or x.dtype, x.device
    if key not in buffers or buffers[key].numel() < x.numel():
        # Memory made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            buffers[key] = torch.empty(x.numel(), dtype=key[0], device=x.device)
    return buffers[key][: x.numel()].view(x.shape)


def blocks(
    x: Tensor, twin: Tensor, scale: Tensor, zero_point: Tensor, *, ch_axis: int | None
) -> Iterator[Block]:
    """Yield views of about BLOCK_SIZE values (GPU_BLOCK_SIZE on a GPU) that cover `x`, each
    with the same view of `twin`, its scale and its zero point.

    `twin` has the shape and the layout of `x`. The last block in memory comes first: the
    scales were computed from the beginning of `x` on, so that its end is in the cache.
    """
    size = BLOCK_SIZE if x.is_cpu else GPU_BLOCK_SIZE
    scale = scale.to(x)
    zero: int | Tensor
    if ch_axis is None:
        zero = int(zero_point) if x.is_cpu else zero_point.to(x)
    else:
        zero = 0 if x.is_cpu and _is_zero(zero_point) else zero_point.to(x)
    if x.numel() <= size:
        # The order of so few values does not matter
        if isinstance(zero, Tensor):
            zero = along_axis(zero, x, ch_axis)
        yield x, twin, along_axis(scale, x, ch_axis), zero
    elif ch_axis is None:
        order = memory_order(x)
        parts = torch.split(x.permute(order).view(-1), size)
        twin_parts = torch.split(twin.permute(order).view(-1), size)
        for part, twin_part in zip(reversed(parts), reversed(twin_parts), strict=True):
            yield part, twin_part, scale, zero
    else:
        yield from _channel_blocks(x, twin, scale, zero, ch_axis=ch_axis, size=size)


def _channel_blocks(
    x: Tensor, twin: Tensor, scale: Tensor, zero: int | Tensor, *, ch_axis: int, size: int
) -> Iterator[Block]:
    """Yield blocks of about `size` values with a scale for each index of `ch_axis`."""
    order = memory_order(x)
    axis = order.index(ch_axis % x.ndim)
    ordered = x.permute(order)
    outer = math.prod(ordered.shape[:axis])
    channels = ordered.shape[axis]
    inner = math.prod(ordered.shape[axis + 1 :])
    values = ordered.view(outer, channels, inner)
    twin_values = twin.permute(order).view(outer, channels, inner)
    scale = scale.view(1, -1, 1)
    wide = max(1, min(channels, size // inner))
    tall = max(1, size // (wide * inner))
    row_starts = reversed(range(0, outer, tall))
    channel_starts = reversed(range(0, channels, wide))
    for row, channel in product(row_starts, channel_starts):
        rows = slice(row, row + tall)
        part = slice(channel, channel + wide)
        block_zero = zero if isinstance(zero, int) else zero.view(1, -1, 1)[:, part]
        yield values[rows, part], twin_values[rows, part], scale[:, part], block_zero
