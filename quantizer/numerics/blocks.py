"""Elementwise work in cache-sized blocks along memory, each with the scales it needs. A kernel
rounds.
"""

import math
import threading
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

# Values per step: 2 MB of float32 stay in the cache for all operations of the step
BLOCK = 1 << 19
# There each operation is started by itself, which few values do not pay for
BLOCK_OF_GPU = 1 << 24
MANTISSA = 0x7FFFFF  # of the bits of float32
# Scales per step: float64 of more is memory that the system may hand out anew for every
# operation
FEW = 1 << 15
_kept = threading.local()  # the memory that `scratch` keeps for a thread

Kernel = Callable[["int | Tensor"], Callable[[Tensor], Tensor]]
"""Takes the zero point; returns what puts code - zero_point, as floating point, in the place of
x / scale.
"""


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


def flattened(x: Tensor) -> Tensor:
    """Return the elements of `x` as one vector, in memory order; a copy only where there are
    gaps in it.
    """
    flat = flat_view(x)
    return x.reshape(-1) if flat is None else flat


def workspace(x: Tensor, least: torch.dtype = torch.float32) -> Tensor:
    """Return `x`, or a copy where it is narrower than `least` or its memory has gaps.

    Raises:
        TypeError: it holds integers.
    """
    if not x.is_floating_point():
        raise TypeError(f"Only floating-point tensors can be quantized, not {x.dtype}.")
    x = x.to(torch.promote_types(x.dtype, least))
    return x.contiguous() if flat_view(x) is None else x


def fill(
    out: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    kernel: Kernel,
    ch_axis: int | None,
) -> Tensor:
    """Write codes, less the zero point, times scale to `out`, of the layout of `x`, which may
    be `x`; return `out`.

    Powers of two are divided by with a product, which is as exact and costs half.

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
    exact = _is_read(x) and _has_exact_inverse(scale)
    for source, to, s, z in blocks(x, out, scale, zero_point, ch_axis):
        divided = (
            torch.mul(source, s.reciprocal(), out=to) if exact else torch.div(source, s, out=to)
        )
        kernel(z)(divided).mul_(s)
    return out


def _is_read(x: Tensor) -> bool:
    """Whether looking at values costs nothing: a GPU would be waited for, and what is saved
    there is less than that.
    """
    return x.device.type == "cpu"


def _is_zero(zero_point: Tensor, x: Tensor) -> bool:
    """Whether there is none that has to be added; the two ends are found many times as fast as
    `any`.
    """
    return zero_point.numel() == 0 or (
        _is_read(x) and all(int(end) == 0 for end in zero_point.aminmax())
    )


def _has_exact_inverse(scale: Tensor) -> bool:
    """Whether 1 / scale loses no bit: of float32 powers of two, the numbers without a
    mantissa.
    """
    if scale.dtype != torch.float32:
        return False
    bits = scale.view(torch.int32).reshape(-1)
    if len(bits) and int(bits[0]) & MANTISSA:  # as nearly all others have
        return False
    return not any(
        part.bitwise_and(MANTISSA).max() for part in torch.split(bits, FEW) if len(part)
    )


def scratch(x: Tensor) -> Tensor | None:
    """Return memory of the shape and dtype of `x`, a block, to work in; None for what only
    stands for a tensor.

    Each thread keeps it, as memory that the system hands out anew for every block costs more
    than the work in it.
    """
    if type(x) is not Tensor or x.numel() > 2 * BLOCK:
        return None
    rooms: dict[tuple[torch.dtype, torch.device], Tensor] = vars(_kept).setdefault("rooms", {})
    key = x.dtype, x.device
    if key not in rooms or rooms[key].numel() < x.numel():
        # Memory made in that mode could not be written to outside
        with torch.inference_mode(False):
            rooms[key] = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    return rooms[key][: x.numel()].view(x.shape)


def blocks(
    x: Tensor, twin: Tensor, scale: Tensor, zero_point: Tensor, ch_axis: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, int | Tensor]]:
    """Yield views of about BLOCK values (BLOCK_OF_GPU) that cover `x`, each with that of
    `twin`, a tensor of its shape and layout, and with the scale and zero point for it.

    The last in memory comes first: who found the scales has read `x` from its beginning, so its
    end is in the cache.
    """
    scale, size = scale.to(x), BLOCK if _is_read(x) else BLOCK_OF_GPU
    if ch_axis is None:
        z = int(zero_point) if _is_read(x) else zero_point.to(x)
        if x.numel() <= size:
            yield x, twin, scale, z
            return
        order = memory_order(x)
        flat, other = (each.permute(order).view(-1) for each in (x, twin))
        for start in reversed(range(0, len(flat), size)):
            yield flat[start : start + size], other[start : start + size], scale, z
        return
    if x.numel() <= size:  # the order of so few values does not matter
        sizes = (-1, *(1,) * (x.ndim - 1 - ch_axis % x.ndim))
        yield (
            x,
            twin,
            scale.view(sizes),
            0 if _is_zero(zero_point, x) else zero_point.to(x).view(sizes),
        )
        return
    order = memory_order(x)
    axis = order.index(ch_axis % x.ndim)
    ordered = x.permute(order)
    channels, inner = ordered.shape[axis], math.prod(ordered.shape[axis + 1 :])
    shape = math.prod(ordered.shape[:axis]), channels, inner
    rows, others = ordered.view(shape), twin.permute(order).view(shape)
    zero_points = None if _is_zero(zero_point, x) else zero_point.to(x).view(1, -1, 1)
    scales = scale.view(1, -1, 1)
    wide = max(1, min(channels, size // max(1, inner)))
    tall = max(1, size // max(1, wide * inner))
    for start, c in product(
        reversed(range(0, len(rows), tall)), reversed(range(0, channels, wide))
    ):
        here, those = slice(c, c + wide), slice(start, start + tall)
        z = 0 if zero_points is None else zero_points[:, here]
        yield rows[those, here], others[those, here], scales[:, here], z
