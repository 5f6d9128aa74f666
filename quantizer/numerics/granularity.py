"""Which values of a tensor share a scale, for per_tensor, per_channel, per_group, per_token and
per_block.

`to_rows` turns a tensor into a matrix with one row per scale.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BlockSize = tuple[int, int]
"""The rows and columns of a block that shares a scale."""
Cut = tuple[str, int | None, int | None, int]
"""qscheme, ch_axis, group_size and scales per group: `QuantizationSpec.cut`."""


def scale_shape(shape: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    """Return the shape of the scale of a tensor of `shape`.

    - "per_tensor": (); with a group size (T,).
    - "per_channel": (C,), for C channels; with a group size (T * C,).
    - "per_group": the other axes in order, and then the number of groups along the channel
      axis, times the scales per group.
    - "per_token": all axes except the channel axis.
    - "per_block": the axes from the third on in order, and then the numbers of blocks along the
      first two axes. A block is a square of as many rows and columns as the group size.

    With a group size, "per_tensor" and "per_channel" are for a stack of T tensors, each as long
    as the group in the first axis. The weight of a transposed convolution with T groups is such
    a stack.

    >>> scale_shape((8, 64), ("per_group", 1, 16, 1))
    (8, 4)
    >>> scale_shape((2, 5, 64), ("per_token", -1, None, 1))
    (2, 5)
    >>> scale_shape((8, 64), ("per_tensor", None, None, 1))
    ()
    >>> scale_shape((8, 64), ("per_tensor", None, 2, 1))
    (4,)
    >>> scale_shape((8, 3, 4, 4), ("per_channel", 1, None, 1))
    (3,)
    >>> scale_shape((8, 3, 4, 4), ("per_channel", 1, 2, 1))
    (12,)
    >>> scale_shape((300, 128), ("per_block", None, 128, 1))
    (3, 1)
    """
    qscheme, ch_axis, group_size, scales_per_group = cut
    if qscheme == "per_block":
        counts = block_counts(shape, _square(group_size))
        return (*shape[2:], *counts)
    if qscheme == "per_tensor":
        return () if group_size is None else (shape[0] // group_size,)
    if ch_axis is None:
        return ()
    axis = ch_axis % len(shape)
    length = shape[axis]
    if qscheme == "per_channel":
        tensors = 1 if group_size is None else shape[0] // group_size
        return (tensors * length,)
    others = shape[:axis] + shape[axis + 1 :]
    if qscheme == "per_token":
        return others
    groups = -(-length // _group_length(length, group_size))
    return (*others, groups * scales_per_group)


def to_rows(x: Tensor, cut: Cut) -> Tensor:
    """Return `x` as a matrix with one row per scale, in the order of `scale_shape`.

    It is a view if the layout in memory allows that. A last group that is shorter is padded
    with zeros, and so are the last blocks of both axes.

    >>> to_rows(torch.arange(6.0).view(2, 3), ("per_group", 1, 2, 1)).tolist()
    [[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [5.0, 0.0]]
    >>> to_rows(torch.arange(6.0).view(2, 3), ("per_block", None, 2, 1)).tolist()
    [[0.0, 1.0, 3.0, 4.0], [2.0, 0.0, 5.0, 0.0]]
    """
    qscheme, ch_axis, group_size, scales_per_group = cut
    if qscheme == "per_block":
        return _to_blocks(x, _square(group_size))
    if qscheme == "per_tensor":
        tensors = 1
        if group_size is not None:
            tensors = len(x) // group_size
        return x.reshape(tensors, -1)
    if ch_axis is None:
        return x.reshape(1, -1)
    if qscheme == "per_channel":
        rows = x.shape[ch_axis]
        if group_size is None:
            return x.movedim(ch_axis, 0).reshape(rows, -1)
        stack = x.reshape(-1, group_size, *x.shape[1:])
        axis = ch_axis % x.dim() + 1
        channels_second = stack.movedim(axis, 1)
        count = len(stack) * rows
        return channels_second.reshape(count, -1)
    last = x.movedim(ch_axis, -1)
    length = last.shape[-1]
    if qscheme == "per_group":
        length = _group_length(length, group_size)
    missing = -last.shape[-1] % length
    if missing:
        last = torch.nn.functional.pad(last, (0, missing))
    return last.reshape(-1, length // scales_per_group)


def from_rows(rows: Tensor, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """Return the tensor of `shape` that `to_rows` cut into `rows`.

    >>> x = torch.arange(12.0).view(2, 3, 2)
    >>> cut = ("per_group", 1, 2, 1)
    >>> torch.equal(from_rows(to_rows(x, cut), x.shape, cut), x)
    True
    """
    qscheme, ch_axis, group_size, _ = cut
    if qscheme == "per_block":
        return _from_blocks(rows, shape, _square(group_size))
    if qscheme == "per_tensor" or ch_axis is None:
        return rows.view(shape)
    axis = ch_axis % len(shape)
    length = shape[axis]
    others = (*shape[:axis], *shape[axis + 1 :])
    if qscheme == "per_channel":
        if group_size is None:
            channels = rows.view(length, *others)
            return channels.movedim(0, axis)
        # The shape of one channel in one tensor of the stack
        channel_shape = (group_size, *others[1:])
        stack = rows.view(-1, length, *channel_shape)
        return stack.movedim(1, axis + 1).reshape(shape)
    padded = rows.view(*others, -1) if others or rows.numel() else rows.view(-1)
    return padded[..., :length].movedim(-1, axis)


def block_counts(shape: Sequence[int], block_size: BlockSize) -> BlockSize:
    """Return the numbers of blocks along the first two axes. The last ones may be smaller.

    >>> block_counts((100, 64), (48, 64))
    (3, 1)
    """
    block_rows, block_columns = block_size
    count = -(-shape[0] // block_rows)
    return (count, -(-shape[1] // block_columns))


def _to_blocks(x: Tensor, block_size: BlockSize) -> Tensor:
    """Return one row for each block of the first two axes."""
    height, width = block_size
    missing_rows = -x.shape[0] % height
    missing_columns = -x.shape[1] % width
    last = x.movedim((0, 1), (-2, -1))
    padded = torch.nn.functional.pad(last, (0, missing_columns, 0, missing_rows))
    rows, columns = block_counts(x.shape, block_size)
    blocks = padded.reshape(*x.shape[2:], rows, height, columns, width)
    blocks = blocks.transpose(-3, -2)
    return blocks.reshape(-1, height * width)


def _from_blocks(values: Tensor, shape: tuple[int, ...], block_size: BlockSize) -> Tensor:
    """Return the tensor of `shape` that `_to_blocks` cut into `values`."""
    counts = block_counts(shape, block_size)
    blocks = values.view(*shape[2:], *counts, *block_size)
    blocks = blocks.transpose(-3, -2)
    padded = blocks.flatten(-2).flatten(-3, -2)
    last = padded[..., : shape[0], : shape[1]]
    return last.movedim((-2, -1), (0, 1))


def _square(group_size: int | None) -> BlockSize:
    size = int(group_size or 1)
    return (size, size)


def _group_length(axis_length: int, group_size: int | None) -> int:
    """Return the length of a group. A size of -1 or None means the whole axis."""
    return axis_length if group_size in (None, -1) else int(group_size)
