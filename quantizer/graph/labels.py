"""Tensors of labels: numbers in the places of a node's values, which say where each value
comes from.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.axis_rules import changes
from quantizer.graph.ir import Node, map_refs
from quantizer.graph.targets import call

NONE = -1
"""The label of a value that comes from no channel."""
UNFOLLOWED = (RuntimeError, TypeError, ValueError, IndexError, KeyError)
"""What torch raises where an operator cannot run on labels."""
_EXAMPLE_BATCH = 2
_CPU = torch.device("cpu")


def run_node(node: Node, value_of: Callable[[str], Any]) -> Any:
    """Run a node's operator on the CPU.

    Args:
        node: a call of torch without parameters.
        value_of: gives what stands for the value of each node that it reads.
    """
    inputs = map_refs(node.inputs, value_of)
    attrs = node.on(_CPU).attrs
    return call(node.target, {**attrs, **inputs})


def example_shape(node: Node) -> torch.Size | None:
    """Return the shape of a node's tensor for a batch of two, None if it makes no single
    tensor.
    """
    if node.shape is None:
        return None
    sizes = [_EXAMPLE_BATCH if size is None else size for size in node.shape]
    return torch.Size(sizes)


def filled_labels(shape: torch.Size, label: float) -> Tensor:
    """Return one label for all values of a shape, without memory for each."""
    return torch.full((), float(label)).expand(shape)


def along_axis(vector: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return labels of a shape that differ only along one axis.

    Args:
        vector: the labels along that axis.
        shape: of the result.
        axis: along which they are.
    """
    sizes = [1] * len(shape)
    sizes[axis] = len(vector)
    return vector.float().view(sizes).expand(shape)


def numbered_labels(shape: torch.Size, axis: int) -> Tensor:
    """Return labels of a shape that count along one axis."""
    return along_axis(torch.arange(shape[axis]), shape, axis)


def compress_labels(labels: Tensor) -> Tensor:
    """Return the same labels, with stride 0 along each axis along which they do not change."""
    for axis in range(labels.dim()):
        size = labels.shape[axis]
        if size < 2 or not labels.stride(axis):
            continue
        first = labels.narrow(axis, 0, 1)
        # Most labels that change differ at the ends, which is faster to compare
        last = labels.narrow(axis, size - 1, 1)
        if torch.equal(first, last) and bool((labels == first).all()):
            labels = first.expand(labels.shape)
    return labels


def changing_axes(labels: Tensor) -> list[int]:
    """Return the axes along which compressed labels change."""
    return [axis for axis in range(labels.dim()) if changes(labels, axis)]


def channels_along(labels: Tensor, axis: int) -> tuple[int, ...] | None:
    """Return compressed labels along one axis, None if they change along another."""
    axis %= labels.dim()
    if set(changing_axes(labels)) - {axis}:
        return None
    vector = labels.movedim(axis, -1)
    while vector.dim() > 1:
        vector = vector[0]
    return tuple(int(label) for label in vector.tolist())


def distinct(labels: Any) -> frozenset[int]:
    """Return all channels among compressed labels of one value, or of several."""
    if labels is None:
        return frozenset()
    if isinstance(labels, (list, tuple)):
        return frozenset().union(*map(distinct, labels))
    for axis, stride in enumerate(labels.stride()):
        if not stride:
            labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return frozenset(int(label) for label in labels.unique().tolist() if label != NONE)
