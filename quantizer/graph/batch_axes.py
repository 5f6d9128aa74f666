"""Finds the axis of each input that counts the samples of a call.

It is axis 0 of most inputs. States of recurrent layers, [layers, batch, hidden], have another
one, and tables that all samples share have none.
"""

from __future__ import annotations

import itertools
import math

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
    another one. If not all tensors begin with this size, some may have no axis of samples.

    >>> features, state = torch.zeros(8, 5, 6), torch.zeros(2, 8, 8)
    >>> choices_of_axes(((features, state), {}))
    [(0, 1), (0, 2), (0, None)]
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
    starts_alike = all(shape[0] == size for shape in shapes if shape)
    of_leaves: list[list[int | None]] = []
    for index, shape in enumerate(shapes):
        axes: list[int | None] = []
        for axis, length in enumerate(shape):
            if length == size:
                axes.append(axis)
        if index == first:
            axes = [0]
        elif not axes or not starts_alike:
            axes.append(None)
        of_leaves.append(axes)
    products = itertools.product(*of_leaves)
    choices = sorted(
        itertools.islice(products, _MOST_PRODUCTS),
        key=_unlikeliness,
    )
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


def samples_in(
    call: Call,
    axes: BatchAxes,
) -> int:
    """Return how many samples a call has, 1 if no leaf counts them."""
    leaves = pytree.tree_leaves(call)
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is not None:
            return int(leaf.shape[axis])
    return 1


def with_samples(
    call: Call,
    axes: BatchAxes,
    count: int,
) -> Call:
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
