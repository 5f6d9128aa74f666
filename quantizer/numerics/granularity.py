"""One row per scale: how a tensor is cut for per_tensor, per_channel, per_group and per_token.
Computes nothing.
"""

import torch
from torch import Tensor


def scale_shape(
    shape: tuple[int, ...],
    qscheme: str,
    ch_axis: int | None = None,
    group_size: int | None = None,
    scales_per_group: int = 1,
) -> tuple[int, ...]:
    """Return the shape of the scale of a tensor of `shape`.

    () per tensor and (C,) per channel. With a `group_size` these two cut a stack of T tensors,
    each `group_size` long in the first axis, into (T,) and (T * C,): the weight of a transposed
    convolution with T groups is such a stack. Per group the other axes in order and then the
    number of groups along `ch_axis`, times `scales_per_group`; per token the axes but
    `ch_axis`.

    >>> scale_shape((8, 64), "per_group", 1, 16), scale_shape((2, 5, 64), "per_token", -1)
    ((8, 4), (2, 5))
    >>> scale_shape((8, 64), "per_tensor"), scale_shape((8, 64), "per_tensor", group_size=2)
    ((), (4,))
    >>> (
    ...     scale_shape((8, 3, 4, 4), "per_channel", 1),
    ...     scale_shape((8, 3, 4, 4), "per_channel", 1, group_size=2),
    ... )
    ((3,), (12,))
    """
    if qscheme == "per_tensor" and group_size is not None:
        return (shape[0] // group_size,)
    if qscheme == "per_tensor" or ch_axis is None:
        return ()
    axis = ch_axis % len(shape)
    others = shape[:axis] + shape[axis + 1 :]
    if qscheme == "per_channel":
        stacked = 1 if group_size is None else shape[0] // group_size
        return (stacked * shape[axis],)
    if qscheme == "per_token":
        return others
    return (*others, -(-shape[axis] // _group(shape[axis], group_size)) * scales_per_group)


def to_rows(
    x: Tensor,
    qscheme: str,
    ch_axis: int | None = None,
    group_size: int | None = None,
    scales_per_group: int = 1,
) -> Tensor:
    """Return `x` as a matrix with one row per scale, in the order of `scale_shape`; a view
    where memory allows it.

    A last group that is shorter is filled up with zeros.

    >>> to_rows(torch.arange(6.0).view(2, 3), "per_group", 1, 2).tolist()
    [[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [5.0, 0.0]]
    """
    if qscheme == "per_tensor" and group_size is not None:
        return x.reshape(len(x) // group_size, -1)
    if qscheme == "per_tensor" or ch_axis is None:
        return x.reshape(1, -1)
    if qscheme == "per_channel" and group_size is not None:
        stack = x.reshape(-1, group_size, *x.shape[1:])
        channels_second = stack.movedim(ch_axis % x.dim() + 1, 1)
        return channels_second.reshape(len(stack) * x.shape[ch_axis], -1)
    if qscheme == "per_channel":
        return x.movedim(ch_axis, 0).reshape(x.shape[ch_axis], -1)
    last = x.movedim(ch_axis, -1)
    size = _group(last.shape[-1], group_size) if qscheme == "per_group" else last.shape[-1]
    missing = -last.shape[-1] % size
    return (torch.nn.functional.pad(last, (0, missing)) if missing else last).reshape(
        -1, size // scales_per_group
    )


def from_rows(
    rows: Tensor,
    shape: tuple[int, ...],
    qscheme: str,
    ch_axis: int | None = None,
    group_size: int | None = None,
    scales_per_group: int = 1,
) -> Tensor:
    """Return the tensor of `shape` whose `to_rows` gave `rows`.

    >>> x = torch.arange(12.0).view(2, 3, 2)
    >>> torch.equal(from_rows(to_rows(x, "per_group", 1, 2), x.shape, "per_group", 1, 2), x)
    True
    """
    if qscheme == "per_tensor" or ch_axis is None:
        return rows.view(shape)
    axis = ch_axis % len(shape)
    others = (*shape[:axis], *shape[axis + 1 :])
    if qscheme == "per_channel" and group_size is not None:
        within = (group_size, *others[1:])  # of one channel of one tensor of the stack
        return rows.view(-1, shape[axis], *within).movedim(1, axis + 1).reshape(shape)
    if qscheme == "per_channel":
        return rows.view(shape[axis], *others).movedim(0, axis)
    wide = rows.view(*others, -1) if others or rows.numel() else rows.view(-1)
    return wide[..., : shape[axis]].movedim(-1, axis)


def _group(length: int, group_size: int | None) -> int:
    """The group's size; -1 or None is the whole axis."""
    return length if group_size in (None, -1) else int(group_size)
