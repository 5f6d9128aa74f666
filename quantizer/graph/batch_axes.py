"""Finds the axis of each input that counts the samples of a call.

It is axis 0 of most inputs. States of recurrent layers, [layers, batch, hidden], have another
one, and tables that all samples share have none.
"""

from __future__ import annotations

import itertools

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
    size: int | None = None
    starts_alike = True
    of_leaves: list[list[int | None]] = []
    for leaf in pytree.tree_leaves(call):
        axes: list[int | None] = []
        if isinstance(leaf, Tensor) and leaf.dim():
            if size is None:
                size = leaf.shape[0]
                axes = [0]
            else:
                axes += [axis for axis in range(leaf.dim()) if leaf.shape[axis] == size]
                starts_alike &= leaf.shape[0] == size
        of_leaves.append(axes or [None])
    if size is None:
        return []
    if not starts_alike:
        of_leaves = [axes if axes == [0] else [*axes, None] for axes in of_leaves]
    few = itertools.islice(itertools.product(*map(dict.fromkeys, of_leaves)), _MOST_PRODUCTS)
    choices = sorted(few, key=_unlikeliness)
    return choices[:_MOST_CHOICES]


def _unlikeliness(axes: BatchAxes) -> tuple[int, int]:
    return axes.count(None), sum(axis for axis in axes if axis is not None)


def axes_of_graph(graph: Graph) -> BatchAxes:
    """Return the axis of each input whose size follows the batch."""
    axes: list[int | None] = []
    for node in graph.nodes:
        if node.op == "input":
            shape = node.shape or ()
            axes.append(shape.index(None) if None in shape else None)
    return tuple(axes)


def has_open_batch(graph: Graph) -> bool:
    """Return whether a call may have any number of samples."""
    return any(axis is not None for axis in axes_of_graph(graph))


def fixed_batch(graph: Graph) -> int | None:
    """Return the number of samples that a call has to have; None if it is open."""
    for node in graph.nodes:
        if node.op == "input" and node.shape:
            return None if has_open_batch(graph) else node.shape[0]
    return None


def samples_in(call: Call, axes: BatchAxes) -> int:
    """Return how many samples a call has, 1 if no leaf counts them."""
    for leaf, axis in zip(pytree.tree_leaves(call), axes, strict=True):
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
        samples = tensor.narrow(axis, 0, min(count, tensor.shape[axis]))
        repeats = -(-count // samples.shape[axis])
        repeated = torch.cat([samples] * repeats, axis)
        leaves[index] = repeated.narrow(axis, 0, count)
    resized: Call = pytree.tree_unflatten(leaves, structure)
    return resized
