"""Small calls like a batch, to compare a module with a stored graph, and what can differ."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.faithful import output_distance
from quantizer.graph.ir import Call, Graph, Node
from quantizer.graph.lengths import Length
from quantizer.sources.batches import Batch

_ROUNDINGS = 8
"""By how many roundings to their dtype the outputs of module and graph may differ. Both add the
same numbers, perhaps in another order.
"""
_SHORTER = 32
"""Sequences of another length than the batch are so many times shorter."""


class DifferentError(Exception):
    """The graph cannot be reused: the module does not compute the same, or an operator does not
    give the dtype or the shape that the graph says.
    """


class SmallCalls:
    """Makes arguments of a call from a batch, with other batch sizes and lengths. The tensors
    are copies, as the module may change them in place.

    Attributes:
        are_open: whether the batch size is not fixed.

    Raises:
        DifferentError: the batch has other arguments than the graph.
    """

    def __init__(self, graph: Graph, batch: Batch) -> None:
        keywords = dict(batch.kwargs)
        call = (batch.args, keywords)
        located, self._structure = pytree.tree_flatten_with_path(call)
        paths: list[tuple[Any, ...]] = []
        self._leaves: list[Any] = []
        for path, leaf in located:
            keys = map(_path_key, path)
            paths.append(tuple(keys))
            self._leaves.append(leaf)
        if tuple(paths) != graph.input_paths:
            raise DifferentError("the call has other arguments")
        self._lengths = graph.lengths
        self._open: set[int] = set()
        inputs = [node for node in graph.nodes if node.op == "input"]
        for index, node in enumerate(inputs):
            if node.shape and node.shape[0] is None:
                self._open.add(index)
        self.are_open = bool(self._open)

    def of(
        self,
        samples: int,
        *,
        at_other_lengths: bool = False,
    ) -> Call:
        """Return a call of so many samples, with the lengths of the batch or with others."""
        leaves = self._sized(samples)
        if at_other_lengths:
            for length in self._lengths:
                for index, axis in length.axes:
                    leaf = leaves[index]
                    leaves[index] = of_other_length(leaf, axis, length)
        call: Call = pytree.tree_unflatten(leaves, self._structure)
        return call

    def _sized(self, samples: int) -> list[Any]:
        """Return copies of the arguments, with this number of samples where the batch size is
        not fixed.
        """
        leaves = list(self._leaves)
        for index, leaf in enumerate(leaves):
            if index in self._open:
                leaves[index] = _of_samples(leaf, samples)
            elif isinstance(leaf, Tensor):
                leaves[index] = leaf.clone()
        return leaves


def _of_samples(tensor: Tensor, samples: int) -> Tensor:
    """Return a copy of the first samples. If there are fewer, they are repeated."""
    copies = math.ceil(samples / len(tensor))
    first = tensor[:samples]
    repeated = torch.cat([first] * copies)
    repeated = repeated[:samples]
    return repeated.clone()


def _path_key(entry: Any) -> Any:
    """Return the index, key or name in an entry of a pytree path, as `Graph.input_paths` has
    it.
    """
    for attribute in ("idx", "key", "name"):
        key = getattr(entry, attribute, None)
        if key is not None:
            return key
    return None


def of_other_length(
    tensor: Tensor,
    axis: int,
    length: Length,
    shorter: int = _SHORTER,
) -> Tensor:
    """Return the tensor much shorter, or longer by one step where it is as short as it can be.

    Args:
        tensor: of a call.
        axis: the one that has the length.
        length: which sizes it may have.
        shorter: how many times shorter it becomes.
    """
    size = tensor.shape[axis]
    if size > length.least:
        return tensor.narrow(axis, 0, length.nearest(size // shorter)).clone()
    last = tensor.narrow(axis, size - 1, 1)
    return torch.cat([tensor, *[last] * length.step], axis)


def check_kind(node: Node, value: Tensor) -> None:
    """Check that a tensor has the dtype and the fixed sizes of a node.

    Raises:
        DifferentError: it does not.
    """
    shape = node.shape
    if shape is None or node.dtype != value.dtype:
        raise DifferentError(f"{node.name} gives another kind of tensor")
    if len(shape) != value.dim():
        raise DifferentError(f"{node.name} gives another shape")
    for axis, size in enumerate(shape):
        is_open = size is None or axis in node.open_axes
        if not is_open and size != value.shape[axis]:
            raise DifferentError(f"{node.name} gives another shape")


def are_nearly_equal(one: Any, other: Any) -> bool:
    """Return whether two outputs are equal, or differ only as if numbers were added in another
    order.
    """
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    if not are_tensors:
        # In contrast to ==, this holds for two numbers that are NaN
        return repr(one) == repr(other)
    if one.dtype != other.dtype:
        return False
    tolerance = 0.0
    if one.is_floating_point():
        tolerance = _ROUNDINGS * torch.finfo(one.dtype).eps
    return output_distance([one], [other]) <= tolerance
