"""Sums of products of what layers read over the calibration data. Sees inputs, no outputs;
solves nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Task
from quantizer.algorithms.patches import by_input, is_linear, weight_matrix, windows
from quantizer.config.wording import shortened
from quantizer.distributed import Ranks
from quantizer.errors import DataError
from quantizer.graph.structure import InputGroup
from quantizer.nn import ExpertLinear
from quantizer.nn.network import Network
from quantizer.observers import NonFiniteError, ObservationError

# Along each side: below the diagonal nothing is computed, which saves 66 of 144 products
TILES = 12
LEAST_TILE = 128
PATCHES = 1 << 24  # values of a convolution's patches at once
DEEPEST = 16384
"""Inputs of an output channel: the Gram matrix has the square of it."""
LEAST_SQUARE = 2.0**-102
"""float32 holds 24 bits of squares of errors down to 2^-24 of the inputs from here on; smaller
sums say nothing.
"""
UNREACHED = "no token of the calibration data reached it; it stays at round-to-nearest"


class Gram:
    """The matrix sum of x x^T of a linear or convolution layer, x being what it multiplies a
    row of its weight with.

    All layers that read one value have one Gram matrix, so any of them will do for `layer`.
    Twice the Gram matrix is the Hessian of the squared error of the layer's outputs.

    Attributes:
        by_group: how many x each group multiplied: rows of a linear layer's inputs, positions
            of a convolution's output; of an expert those that were routed to it.

    Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323), section 3.1.

    >>> gram = Gram(nn.Linear(2, 3))
    >>> gram.add(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> gram.matrix.tolist(), gram.tokens
    ([[[10.0, 14.0], [14.0, 20.0]]], 2)
    """

    def __init__(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        groups, _, depth = weight_matrix(layer, weight).shape
        self._layer, self.by_group = layer, [0] * groups
        # Valid on and above the diagonal tiles
        self._sum = torch.zeros(groups, depth, depth, device=weight.device)
        tile = max(LEAST_TILE, -(-depth // TILES))
        self._tiles = [
            slice(start, min(start + tile, depth)) for start in range(0, depth, tile)
        ]

    @property
    def tokens(self) -> int:
        """How many x there were."""
        return sum(self.by_group) if self.is_routed else self.by_group[0]

    @property
    def is_routed(self) -> bool:
        """Whether groups have tokens of their own, and all channels."""
        return isinstance(self._layer, ExpertLinear)

    @property
    def matrix(self) -> Tensor:
        """The sum so far, float32 [groups, depth, depth], symmetric; it may be changed once
        nothing is added any more.

        Shared with this object, not copied.
        """
        for here in self._tiles:
            self._sum[:, here.stop :, here] = self._sum[:, here, here.stop :].mT
        return self._sum

    @torch.no_grad()
    def add(self, input: Tensor, **routing: Tensor) -> None:  # noqa: A002 - as the layer's own forward names it
        """Take in one batch: the layer's input, any floating-point dtype, and what says which
        rows are an expert's.

        Raises:
            NonFiniteError: it holds NaN or infinity; the sums are of no use any more.
            ObservationError: its squares are beyond float32.
        """
        x = input
        for groups, rows in _parts(self._layer, x, routing):  # [groups, positions, depth]
            for group in groups:
                self.by_group[group] += rows.shape[1]
            if len(rows) == 1:  # addmm_ writes to a part of a matrix, baddbmm_ to a copy
                own, sums = rows[0], self._sum[groups[0]]
                for here in self._tiles:
                    sums[here, here.start :].addmm_(own[:, here].T, own[:, here.start :])
            else:
                for here in self._tiles:
                    self._sum[:, here, here.start :].baddbmm_(
                        rows[..., here].mT, rows[..., here.start :]
                    )
        if not math.isfinite(self._sum.diagonal(dim1=1, dim2=2).sum()):
            if math.isfinite(x.float().abs().sum()):
                raise ObservationError(
                    f"Values as large as {x.abs().max():g} have squares beyond float32."
                )
            raise NonFiniteError(int(x.isnan().sum()), int(x.isinf().sum()), x.numel())

    def merge(self, ranks: Ranks, to: int | None = None) -> None:
        """Take in what the other ranks have summed up of their batches, at rank `to` or at all.

        Each sum is one of float32; they are added in float64 and rounded once. A sum of n
        products has an error of at most n u sum |x_i x_j| with u = 2^-24, in whatever order
        they come; so what N ranks find differs from what one does by at most 2 n u sum |x_i
        x_j|, and is the same in every run of N. A rank that does not get the others' sums has
        none afterwards.
        """
        if not ranks.is_alone:
            self._sum = ranks.sum(self._sum, "a Gram matrix", to)
            found = ranks.gather(self.by_group, "the tokens of a Gram matrix")
            self.by_group = [sum(counts) for counts in zip(*found, strict=True)]


class Drift:
    """The matrix sum of (f - x) x^T, with x as in `Gram`, and f the same in another network:
    [groups, depth, depth].

    Exactly zero if both are equal, as sums of f x^T and x x^T in two ways would not be.

    >>> drift = Drift(nn.Linear(2, 3))
    >>> drift.add(torch.tensor([[3.0, 2.0]]), torch.tensor([[1.0, 2.0]]))
    >>> drift.matrix.tolist()
    [[[2.0, 4.0], [0.0, 0.0]]]
    """

    def __init__(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        groups, _, depth = weight_matrix(layer, weight).shape
        self._layer, self.matrix = (
            layer,
            torch.zeros(groups, depth, depth, device=weight.device),
        )

    @torch.no_grad()
    def add(self, f: Tensor, x: Tensor) -> None:
        """Take in one batch, of one shape."""
        for (_, left), (_, right) in zip(
            _parts(self._layer, f.float() - x.float()), _parts(self._layer, x), strict=True
        ):
            self.matrix.baddbmm_(left.mT, right)

    def merge(self, ranks: Ranks, to: int | None = None) -> None:
        """As `Gram.merge`."""
        self.matrix = ranks.sum(self.matrix, "a drift", to)


class GroupSums:
    """The Gram matrices of `layers` that read one value: one for all that multiply the same
    patches of it.
    """

    def __init__(self, network: Network, layers: Sequence[str]) -> None:
        self.layers = layers
        self._geometry = {name: geometry(network.layers[name]) for name in layers}
        self._first = {key: name for name, key in reversed(self._geometry.items())}
        self._grams = {key: Gram(network.layers[name]) for key, name in self._first.items()}

    @property
    def tokens(self) -> int:
        """How many rows of inputs the layers had."""
        return max(gram.tokens for gram in self._grams.values())

    def add(self, input: Tensor, **routing: Tensor) -> None:  # noqa: A002 - as the layer's own forward names it
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        for key, gram in self._grams.items():
            try:
                gram.add(input, **routing)
            except ObservationError as error:
                raise not_finite(self._first[key], error) from error

    def merge(self, ranks: Ranks) -> None:
        """Take in what the other ranks have summed up; all have all afterwards."""
        for gram in self._grams.values():
            gram.merge(ranks)

    @cached_property
    def _matrices(self) -> dict[tuple[Any, ...], Tensor]:
        """The sums, once all batches are in."""
        return {key: _without_tiny(gram.matrix) for key, gram in self._grams.items()}

    def matrix(self, layer: str) -> Tensor:
        """Sum of x x^T of a layer's inputs, [groups, depth, depth]."""
        return self._matrices[self._geometry[layer]]

    def alive(self, layer: str) -> Tensor:
        """The same, inputs that were always zero as if they were like the others, but on their
        own; experts without any token stay so.
        """
        matrix = self.matrix(layer)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        dead = diagonal == 0
        if self._grams[self._geometry[layer]].is_routed:
            dead &= ~dead.all(1, keepdim=True)
        if not bool(dead.any()) or bool(dead.all()):
            return matrix
        matrix = matrix.clone()
        matrix.diagonal(dim1=1, dim2=2)[dead] = diagonal[diagonal > 0].mean()
        return matrix

    @property
    def unrouted(self) -> list[str]:
        """What there is to say of experts without tokens."""
        return [
            text
            for gram in self._grams.values()
            if gram.is_routed
            for text in unrouted(gram.by_group)
        ]

    def channel_size(self, channels: int, *, by_expert: bool = False) -> Tensor:
        """The root mean square of each channel of the value, or of each in the tokens of each
        expert; 0 of those of an expert without any.
        """
        key, gram = next(iter(self._grams.items()))
        squares = self._matrices[key].diagonal(dim1=1, dim2=2)
        if by_expert:
            tokens = torch.tensor(gram.by_group, device=squares.device).clamp_min(1)
            return (squares / tokens[:, None]).sqrt().flatten()
        squares = squares.sum(0) if gram.is_routed else squares.reshape(channels, -1).mean(1)
        return (squares / gram.tokens).sqrt()

    def divided(self, layer: str, factors: Tensor) -> Tensor:
        """A matrix for the value with its channels divided by `factors`."""
        matrix = self.matrix(layer)
        is_routed = self._grams[self._geometry[layer]].is_routed
        columns = (
            factors.view(-1, matrix.shape[1])
            if is_routed
            else by_input(factors, *matrix.shape[:2])
        )
        return (matrix / columns[:, None]).div_(columns[:, :, None])

    def divide(self, factors: Tensor) -> None:
        """All matrices so; nothing is added any more."""
        for key, name in self._first.items():
            self._matrices[key] = self.divided(name, factors)


def _without_tiny(matrix: Tensor) -> Tensor:
    """The matrix, changed in place: inputs whose squares float32 cannot tell apart are zero, as
    if they never came.
    """
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    is_tiny = (diagonal > 0) & (diagonal < LEAST_SQUARE)
    if bool(is_tiny.any()):
        matrix.masked_fill_(is_tiny[:, :, None] | is_tiny[:, None, :], 0.0)
    return matrix


def quantized_layers(task: Task, group: InputGroup) -> list[str]:
    """The group's layers whose weights are rounded."""
    specs = {name: task.specs.get((name, "weights")) for name in group.layers}
    return [name for name, spec in specs.items() if spec is not None and spec.is_scaled]


def deepest(network: Network, layers: Iterable[str]) -> int:
    """The largest number of inputs that an output of these layers is a sum of."""
    weights = [
        (network.layers[name], network.layers[name].get_parameter("weight")) for name in layers
    ]
    return max(weight_matrix(layer, weight).shape[2] for layer, weight in weights)


def geometry(layer: nn.Module) -> tuple[Any, ...]:
    """Layers that read one value and are equal in this multiply the same patches of it."""
    fields = (
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "output_padding",
        "transposed",
    )
    return tuple(getattr(layer, key, None) for key in fields)


def not_finite(layer: str, error: ObservationError) -> DataError:
    """The error about a value that a layer reads; whoever knows the batch adds it."""
    if isinstance(error, NonFiniteError):
        text = (
            f"the input of {layer} has {error.nans} NaN and {error.infinities} infinite values"
        )
        return DataError(text, help="check that batch, and the weights of the layers before")
    return DataError(f"the input of {layer}: {error}", help="check that batch")


def unrouted(by_group: Sequence[int]) -> Iterator[str]:
    """That experts had no tokens, as a sentence, where others had some.

    >>> print(*unrouted([3, 0]))  # doctest: +ELLIPSIS
    no token of the calibration data was routed to expert 1 (of 2), which stays at ...
    """
    missed = [f"expert {expert}" for expert, count in enumerate(by_group) if not count]
    if 0 < len(missed) < len(by_group):
        names = f"{shortened(missed)} (of {len(by_group)})"
        stay = "stays" if len(missed) == 1 else "stay"
        yield (
            f"no token of the calibration data was routed to {names}, which {stay} at "
            "round-to-nearest"
        )


def zero_channels(count: int) -> str:
    """That rows and columns of a matrix are zero, as the start of a sentence.

    >>> zero_channels(1)
    '1 input channel was zero on the calibration data'
    """
    which = "1 input channel was" if count == 1 else f"{count} input channels were"
    return f"{which} zero on the calibration data"


def _parts(
    layer: nn.Module, x: Tensor, routing: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """What the layer multiplies its weight with: groups, and for each float32 [groups,
    positions, depth], in parts.
    """
    if isinstance(layer, ExpertLinear):
        for expert, own in enumerate(layer.rows(**(routing or {}))):
            yield [expert], x[own].float()[None]
    elif is_linear(layer):
        yield [0], x.reshape(1, -1, x.shape[-1]).float()
    else:
        for part in windows(layer, x, PATCHES):
            yield range(len(part)), part.float()
