"""Writes convolutions whose filters are computed for each sample as products of matrices.

Such a network puts the samples of a batch into groups: `conv2d(x.view(1, b * c, h, w),
filters, groups=b)`. In ONNX, the number of groups is a constant, and here it follows the batch.
Trackers compare images so, and dynamic convolutions and StyleGAN2 compute filters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from quantizer.graph.ir import Node, Ref

_CONV1D = torch.ops.aten.conv1d
_CONV2D = torch.ops.aten.conv2d
_CONV_TRANSPOSE2D = torch.ops.aten.conv_transpose2d
_GROUPS = 6
"""The place of the number of groups in the arguments of a convolution."""
_SETTINGS = ("stride", "padding", "dilation", "groups")
_SETTINGS_OF_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
"""The names of the arguments behind the bias, in torch's order."""


def follows_batch(node: fx.Node) -> bool:
    """Return whether the number of groups of a convolution in a program follows the batch."""
    return len(node.args) > _GROUPS and isinstance(node.args[_GROUPS], fx.Node)


def lacks_product(node: Node) -> bool:
    """Return whether a layer of a graph is such a convolution and has no form as a product."""
    names = [str(operator) for operator in PRODUCTS]
    return isinstance(node.inputs.get("groups"), Ref) and node.target not in names


@dataclass(frozen=True)
class _Windows:
    """The windows of an input that meet the filters, with a number for each axis.

    Attributes:
        kernel: the size of a filter.
        strides: how far windows are apart.
        dilations: how far the positions of a window are apart.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    def width(self, axis: int) -> int:
        """Return how many positions a window covers along an axis."""
        gaps = self.kernel[axis] - 1
        return self.dilations[axis] * gaps + 1

    def count(self, axis: int, length: int) -> int:
        """Return how many windows there are along an axis of that length."""
        free = length - self.width(axis)
        return free // self.strides[axis] + 1


# torch calls the functions below with an operator's arguments. NotImplemented leaves the
# operator as it is.


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Any:
    """Multiply the windows of each group by its filters."""
    settings = dict(zip(_SETTINGS, arguments, strict=False))
    groups = settings.get("groups", 1)
    if isinstance(groups, int):
        return NotImplemented
    dims = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    windows = _Windows(
        kernel,
        strides=_for_each_axis(settings["stride"], dims),
        dilations=_for_each_axis(settings["dilation"], dims),
    )
    padding = settings["padding"]
    edges = _edges(padding, windows)
    padded = functional.pad(x, edges)
    sizes: list[int] = []
    for axis, length in enumerate(padded.shape[2:]):
        sizes.append(windows.count(axis, length))
    batch = x.shape[0]
    outputs = weight.shape[0]
    inputs = math.prod(weight.shape[1:])
    columns = _columns(padded, windows)
    columns = columns.reshape(batch, groups, inputs, -1)
    filters = weight.reshape(groups, -1, inputs)
    products = torch.matmul(filters, columns)
    sums = products.reshape(batch, outputs, *sizes)
    return _with_bias(sums, bias)


def _columns(x: Tensor, windows: _Windows) -> Tensor:
    """Return the values of each window as a column."""
    kernel = windows.kernel
    strides = windows.strides
    dilations = windows.dilations
    if len(kernel) == 1:
        # torch cuts windows out of images only
        x = x.unsqueeze(2)
        kernel = (1, *kernel)
        strides = (1, *strides)
        dilations = (1, *dilations)
    return functional.unfold(x, kernel, dilations, 0, strides)


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None, *arguments: Any) -> Any:
    """Multiply each position by the filters of its group, and add up windows that overlap."""
    settings = dict(zip(_SETTINGS_OF_TRANSPOSED, arguments, strict=False))
    groups = settings.get("groups", 1)
    if isinstance(groups, int):
        return NotImplemented
    kernel = tuple(weight.shape[2:])
    windows = _Windows(
        kernel,
        strides=_for_each_axis(settings["stride"], 2),
        dilations=_for_each_axis(settings.get("dilation", (1,)), 2),
    )
    padding = _for_each_axis(settings["padding"], 2)
    added = _for_each_axis(settings["output_padding"], 2)
    covered: list[int] = []
    edges: list[int] = []
    for axis, length in enumerate(x.shape[2:]):
        last = (length - 1) * windows.strides[axis]
        covered.append(last + windows.width(axis))
        # Padding of a transposed convolution cuts its output
        before = -padding[axis]
        after = added[axis] - padding[axis]
        edges = [before, after, *edges]
    batch = x.shape[0]
    inputs = weight.shape[0] // groups
    positions = x.reshape(batch, groups, inputs, -1)
    filters = weight.reshape(groups, inputs, -1)
    filters = filters.transpose(1, 2)
    products = torch.matmul(filters, positions)
    values = groups * math.prod(weight.shape[1:])
    columns = products.reshape(batch, values, -1)
    sums = functional.fold(
        columns, tuple(covered), kernel, windows.dilations, stride=windows.strides
    )
    sums = functional.pad(sums, edges)
    return _with_bias(sums, bias)


def _for_each_axis(values: Sequence[int], dims: int) -> tuple[int, ...]:
    """Return an argument of a convolution with a number for each axis."""
    repeats = dims // len(values)
    return tuple(values) * repeats


def _edges(padding: Sequence[int] | str, windows: _Windows) -> list[int]:
    """Return how much is padded before and after each axis, the last axis first."""
    dims = len(windows.kernel)
    edges: list[int] = []
    for axis in reversed(range(dims)):
        if isinstance(padding, str):
            both = 0
            if padding == "same":
                both = windows.width(axis) - 1
            before = both // 2
            after = both - before
        else:
            before = _for_each_axis(padding, dims)[axis]
            after = before
        edges += [before, after]
    return edges


def _with_bias(sums: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return sums
    ones = [1] * (sums.dim() - 2)
    by_channel = bias.reshape(-1, *ones)
    return sums + by_channel


PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    _CONV1D.default: _convolution,
    _CONV1D.padding: _convolution,
    _CONV2D.default: _convolution,
    _CONV2D.padding: _convolution,
    _CONV_TRANSPOSE2D.input: _transposed,
}
"""The convolutions that have a form as a product, by operator."""
