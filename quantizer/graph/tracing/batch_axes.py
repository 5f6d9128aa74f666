"""Finds the axis of each input that counts the samples of a call.

It is axis 0 of most inputs. States of recurrent layers, [layers, batch, hidden], have another
one, and tables that all samples share have none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Call, Graph

BatchAxes = tuple[int | None, ...]
"""The axis of the samples by leaf of a call; None for a leaf without one."""
_MOST_CHOICES = 6
"""So many choices of axes are tried: each takes a part of a trace."""
_MOST_PRODUCTS = 256
"""So many choices are ordered; a call of many tensors has more."""


def choices_of_axes(call: Call) -> list[BatchAxes]:
    """Return the axes that may count the samples, the likeliest choice first.

    The first tensor has them in axis 0. The others have the first axis of the same size, or
    another one. If not all tensors begin with this size, some may have no axis of samples. If
    no other tensor has this size, the first may have time in axis 0 and samples in axis 1.

    >>> features, state = torch.zeros(8, 5, 6), torch.zeros(2, 8, 8)
    >>> choices_of_axes(((features, state), {}))
    [(0, 1), (0, 2), (0, None)]
    >>> choices_of_axes(((features.transpose(0, 1), state), {}))
    [(0, None), (1, 1), (1, 2)]
    """
    leaves = pytree.tree_leaves(call)
    shapes: list[tuple[int, ...]] = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        shape = tuple(leaf.shape) if is_tensor else ()
        shapes.append(shape)
    first = next((index for index, shape in enumerate(shapes) if shape), None)
    if first is None:
        return []
    size = shapes[first][0]
    others = [shape for shape in shapes[first + 1 :] if shape]
    may_be_shared = any(shape[0] != size for shape in others)
    choices = _choices(shapes, first, 0, may_be_shared)
    is_time = others and not any(size in shape for shape in others)
    if is_time and len(shapes[first]) > 1:
        for axes in _choices(shapes, first, 1, may_be_shared):
            if axes.count(None) == shapes.count(()):
                choices.append(axes)
    return choices


def _choices(
    shapes: Sequence[tuple[int, ...]], first: int, axis_of_first: int, may_be_shared: bool
) -> list[BatchAxes]:
    """Return the likeliest choices where the tensor `first` has its samples in `axis_of_first`.

    Args:
        may_be_shared: whether a tensor that has an axis of this size may have no samples.
    """
    size = shapes[first][axis_of_first]
    of_leaves: list[list[int | None]] = []
    for index, shape in enumerate(shapes):
        axes: list[int | None] = []
        for axis, length in enumerate(shape):
            if length == size:
                axes.append(axis)
        if index == first:
            axes = [axis_of_first]
        elif not axes or may_be_shared:
            axes.append(None)
        of_leaves.append(axes)
    products = itertools.product(*of_leaves)
    choices = sorted(itertools.islice(products, _MOST_PRODUCTS), key=_unlikeliness)
    return choices[:_MOST_CHOICES]


def _unlikeliness(axes: BatchAxes) -> tuple[int, int]:
    """Return how many leaves have no axis, and how far behind the axes of the others are."""
    total = 0
    for axis in axes:
        if axis is not None:
            total += axis
    return axes.count(None), total


def axes_of_graph(graph: Graph) -> BatchAxes:
    """Return the axis of each input whose size follows the batch."""
    axes: list[int | None] = []
    for node in graph.nodes:
        if node.op != "input":
            continue
        axis: int | None = None
        if node.shape and None in node.shape:
            axis = node.shape.index(None)
        axes.append(axis)
    return tuple(axes)


def has_open_batch(graph: Graph) -> bool:
    """Return whether a call may have any number of samples."""
    axes = axes_of_graph(graph)
    return any(axis is not None for axis in axes)


def fixed_batch(graph: Graph) -> int | None:
    """Return the number of samples that a call has to have; None if it is open."""
    if has_open_batch(graph):
        return None
    for node in graph.nodes:
        if node.op == "input" and node.shape:
            return node.shape[0]
    return None


def samples_in(call: Call, axes: BatchAxes) -> int:
    """Return how many samples a call has, 1 if no leaf counts them."""
    leaves = pytree.tree_leaves(call)
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is not None:
            return int(leaf.shape[axis])
    return 1


def with_samples(call: Call, axes: BatchAxes, count: int) -> Call:
    """Return the call with its samples cut or repeated to `count`."""
    leaves, structure = pytree.tree_flatten(call)
    for index, axis in enumerate(axes):
        if axis is None:
            continue
        tensor = leaves[index].detach()
        size = min(count, tensor.shape[axis])
        samples = tensor.narrow(axis, 0, size)
        repeats = math.ceil(count / size)
        repeated = torch.cat([samples] * repeats, axis)
        leaves[index] = repeated.narrow(axis, 0, count)
    resized: Call = pytree.tree_unflatten(leaves, structure)
    return resized
