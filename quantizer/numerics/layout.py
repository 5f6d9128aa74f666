"""How a tensor lies in memory, so that elementwise work can run along it. Copies nothing."""

from __future__ import annotations

from torch import Tensor


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of `x` from the outermost to the innermost in memory.

    >>> import torch
    >>> memory_order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    [0, 2, 3, 1]
    """
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dim: -strides[dim])


def flat_view(x: Tensor) -> Tensor | None:
    """Return the elements of `x` as one vector in memory order, sharing its memory, or None if there are gaps in it.

    >>> import torch
    >>> flat_view(torch.arange(6).view(2, 3).T).tolist()
    [0, 1, 2, 3, 4, 5]
    >>> flat_view(torch.arange(6)[::2]) is None
    True
    """
    ordered = x.permute(memory_order(x))
    return ordered.view(-1) if ordered.is_contiguous() else None
