"""What is gathered of the value that a group's layers read, in one segment or one pass. Chooses nothing."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from quantizer.algorithms.adjustment import Task
from quantizer.algorithms.gram import Gram
from quantizer.algorithms.patches import weight_matrix
from quantizer.errors import DataError
from quantizer.graph.structure import InputGroup
from quantizer.nn.network import Network
from quantizer.observers import NonFiniteError, ObservationError


class GroupSums:
    """The Gram matrices of layers that read one value: one for all that multiply the same patches of it."""

    def __init__(self, network: Network, layers: Iterable[str]) -> None:
        self._geometry = {name: geometry(network.layers[name]) for name in layers}
        self._first = {key: name for name, key in reversed(self._geometry.items())}
        self._grams = {key: Gram(network.layers[name]) for key, name in self._first.items()}

    @property
    def tokens(self) -> int:
        """How many rows of inputs the layers had."""
        return max(gram.tokens for gram in self._grams.values())

    def add(self, x: Tensor) -> None:
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        for key, gram in self._grams.items():
            try:
                gram.add(x)
            except ObservationError as error:
                raise not_finite(self._first[key], error) from error

    @cached_property
    def _matrices(self) -> dict[tuple[Any, ...], Tensor]:
        """The sums, once all batches are in."""
        return {key: gram.matrix for key, gram in self._grams.items()}

    def matrix(self, layer: str) -> Tensor:
        """Sum of x x^T of a layer's inputs, [groups, depth, depth]."""
        return self._matrices[self._geometry[layer]]

    def alive(self, layer: str) -> Tensor:
        """The same, inputs that were always zero as if they were like the others, but on their own."""
        matrix = self.matrix(layer)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        dead = diagonal == 0
        if not bool(dead.any()) or bool(dead.all()):
            return matrix
        matrix = matrix.clone()
        matrix.diagonal(dim1=1, dim2=2)[dead] = diagonal[~dead].mean()
        return matrix

    def channel_size(self, channels: int) -> Tensor:
        """The root mean square of each channel of the value."""
        key, gram = next(iter(self._grams.items()))
        squares = self._matrices[key].diagonal(dim1=1, dim2=2).reshape(channels, -1)
        return (squares.mean(1) / gram.tokens).sqrt()

    def divided(self, layer: str, factors: Tensor) -> Tensor:
        """A matrix for the value with its channels divided by `factors`."""
        matrix = self.matrix(layer)
        by_input = factors.view(len(matrix), -1).repeat_interleave(matrix.shape[1] * len(matrix) // len(factors), 1)
        return (matrix / by_input[:, None]).div_(by_input[:, :, None])

    def divide(self, factors: Tensor) -> None:
        """All matrices so; nothing is added any more."""
        for key, name in self._first.items():
            self._matrices[key] = self.divided(name, factors)


def quantized_layers(task: Task, group: InputGroup) -> list[str]:
    """The group's layers whose weights are rounded."""
    found = []
    for name in group.layers:
        spec = task.specs.get((name, "weights"))
        if spec is not None and spec.is_scaled:
            found.append(name)
    return found


def deepest(network: Network, layers: Iterable[str]) -> int:
    """The largest number of inputs that an output of these layers is a sum of."""
    weights = [(network.layers[name], network.layers[name].get_parameter("weight")) for name in layers]
    return max(weight_matrix(layer, weight).shape[2] for layer, weight in weights)


def geometry(layer: nn.Module) -> tuple[Any, ...]:
    """Layers that read one value and are equal in this multiply the same patches of it."""
    fields = ("kernel_size", "stride", "padding", "dilation", "groups", "output_padding", "transposed")
    return tuple(getattr(layer, key, None) for key in fields)


def not_finite(layer: str, error: ObservationError) -> DataError:
    """The error about a value that a layer reads; whoever knows the batch adds it."""
    if isinstance(error, NonFiniteError):
        text = f"the input of {layer} has {error.nans} NaN and {error.infinities} infinite values"
        return DataError(text, help="check that batch, and the weights of the layers before")
    return DataError(f"the input of {layer}: {error}", help="check that batch")
