"""Sum up products of what layers read over the calibration data: H of GPTQ, and its kin.

Sees the inputs of layers only; solves nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import first_names
from quantizer.distributed import Ranks
from quantizer.errors import DataError
from quantizer.graph.structure.definitions import InputGroup
from quantizer.layerwise.adjustment import Task
from quantizer.layerwise.patches import by_input, is_linear, matrix_shape, windows
from quantizer.layerwise.sequential_runner import no_batches
from quantizer.nn import ExpertLinear
from quantizer.nn.network import Network, Watchers
from quantizer.observers import NonFiniteError, ObservationError
from quantizer.sources.batches import Batch, prefix_batch_errors

# Tiles along each side. Nothing is computed below the diagonal: 66 of 144 products
_TILES = 12
_MIN_TILE = 128
# On a GPU few large products are faster, and rows of other lengths are not aligned
_TILE_OF_A_DEVICE = 1024
# Values of a convolution's patches at once
_MAX_PATCH_VALUES = 1 << 24
DEEPEST = 16384
"""The largest number of inputs of an output channel. The Gram matrix has the square of it."""
_EXACT_PRODUCTS = (torch.bfloat16, torch.float16)
"""Types that a GPU multiplies exactly and sums up in float32."""
_MIN_SQUARE_SUM = 2.0**-102
"""The smallest sum of squares that says something. In float32, it has 24 bits of squares of
errors down to 2^-24 of the inputs.
"""
TOO_DEEP = (
    f"it sums over more than {DEEPEST} inputs, too many for their Gram matrix; it stays at "
    "round-to-nearest"
)
UNREACHED = "no token of the calibration data reached it; it stays at round-to-nearest"


class Gram:
    """Sums x x^T of a linear or convolution layer, where x is what it multiplies a row of its
    weight with.

    All layers that read one value have one Gram matrix, so any of them will do for `layer`.
    Twice the Gram matrix is the Hessian of the squared error of the layer's outputs.

    Attributes:
        by_group: how many x each group multiplied: rows of a linear layer's inputs, positions
            of a convolution's output, tokens that were routed to an expert.

    Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323), section 3.1.

    >>> gram = Gram(nn.Linear(2, 3))
    >>> gram.add(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]))
    >>> gram.matrix.tolist(), gram.tokens
    ([[[10.0, 14.0], [14.0, 20.0]]], 2)
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        # Valid on and above the diagonal tiles
        self._sum = _zeros(layer)
        groups, depth, _ = self._sum.shape
        self.by_group = [0] * groups
        size = max(_MIN_TILE, -(-depth // _TILES))
        if self._sum.device.type != "cpu":
            size = _TILE_OF_A_DEVICE
        starts = range(0, depth, size)
        self._tiles = [slice(start, min(start + size, depth)) for start in starts]

    @property
    def tokens(self) -> int:
        """Return how many x there were."""
        return sum(self.by_group) if self.is_routed else self.by_group[0]

    @property
    def is_routed(self) -> bool:
        """Check whether each group has tokens of its own, and all channels."""
        return isinstance(self._layer, ExpertLinear)

    @property
    def matrix(self) -> Tensor:
        """Return the sum so far, float32 [groups, depth, depth], symmetric.

        It is shared with this object, not copied. It may be changed once nothing is added any
        more.
        """
        for tile in self._tiles:
            self._sum[:, tile.stop :, tile] = self._sum[:, tile, tile.stop :].mT
        return self._sum

    @torch.no_grad()
    def add(
        self,
        input: Tensor,  # noqa: A002 - as the layer's forward names it
        **routing: Tensor,
    ) -> None:
        """Take in one batch.

        Args:
            input: the layer's input, any floating-point dtype.
            routing: which rows are an expert's.

        Raises:
            NonFiniteError: it holds NaN or infinity; the sums are of no use any more.
            ObservationError: its squares are beyond float32.
        """
        for groups, part in _parts(self._layer, input, routing):
            # On a GPU, a single matrix of 16 bits is multiplied exactly as it is
            is_exact = len(part) == 1 and part.is_cuda and part.dtype in _EXACT_PRODUCTS
            x = part if is_exact else part.float()
            for group in groups:
                self.by_group[group] += x.shape[1]
            for tile in self._tiles:
                right = slice(tile.start, None)
                if len(x) == 1:
                    total = self._sum[groups[0]][tile, right]
                    _add_product(total, x[0][:, tile].T, x[0][:, right])
                else:
                    self._sum[:, tile, right].baddbmm_(x[..., tile].mT, x[..., right])
        if not math.isfinite(self._sum.diagonal(dim1=1, dim2=2).sum()):
            if math.isfinite(input.float().abs().sum()):
                raise ObservationError(
                    f"Values as large as {input.abs().max():g} have squares beyond float32."
                )
            raise NonFiniteError(input)

    def merge(self, ranks: Ranks, to: int | None = None) -> None:
        """Take in what the other ranks have summed up of their batches, at rank `to` or at all.

        The float32 sums of ranks are added in float64 and rounded once. A sum of n products has
        an error of at most n u sum |x_i x_j| with u = 2^-24, in any order. So the result of N
        ranks differs from that of one by at most 2 n u sum |x_i x_j|, and is the same in every
        run of N. A rank that does not get the others' sums has none afterwards.
        """
        self._sum = ranks.sum(self._sum, "a Gram matrix", to)
        counts = ranks.gather(self.by_group, "the tokens of a Gram matrix")
        self.by_group = [sum(of_ranks) for of_ranks in zip(*counts, strict=True)]


class Drift:
    """Sums (f - x) x^T, with x as in `Gram`, and f the same in the float network.

    Exactly zero if both are equal. Separate sums of f x^T and x x^T would not be.

    Attributes:
        matrix: the sum so far, float32 [groups, depth, depth].

    >>> drift = Drift(nn.Linear(2, 3))
    >>> drift.add(torch.tensor([[3.0, 2.0]]), torch.tensor([[1.0, 2.0]]))
    >>> drift.matrix.tolist()
    [[[2.0, 4.0], [0.0, 0.0]]]
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.matrix = _zeros(layer)

    @torch.no_grad()
    def add(self, f: Tensor, x: Tensor) -> None:
        """Take in one batch, of one shape."""
        differences = _parts(self._layer, f.float() - x.float())
        inputs = _parts(self._layer, x)
        for (_, difference), (_, part) in zip(differences, inputs, strict=True):
            self.matrix.baddbmm_(difference.mT, part.float())

    def merge(self, ranks: Ranks, to: int | None = None) -> None:
        """Take in the sums of the other ranks, as `Gram.merge` does."""
        self.matrix = ranks.sum(self.matrix, "a drift", to)


class GroupSums:
    """Holds the Gram matrices of `layers` that read one value: one for all that multiply the
    same patches of it.
    """

    def __init__(self, network: Network, layers: Sequence[str]) -> None:
        self.layers = layers
        self._geometry = {name: geometry(network.layers[name]) for name in layers}
        # The first layer of each geometry; the geometry of the last layer comes first
        self._first = {key: name for name, key in reversed(self._geometry.items())}
        self._grams = {key: Gram(network.layers[name]) for key, name in self._first.items()}

    @property
    def tokens(self) -> int:
        """Return how many rows of inputs the layers had."""
        return max(gram.tokens for gram in self._grams.values())

    def add(
        self,
        input: Tensor,  # noqa: A002 - as the layer's forward names it
        **routing: Tensor,
    ) -> None:
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        for key, gram in self._grams.items():
            try:
                gram.add(input, **routing)
            except ObservationError as error:
                raise not_finite_input(self._first[key], error) from error

    def merge(self, ranks: Ranks) -> None:
        """Take in what the other ranks have summed up; all have all afterwards."""
        for gram in self._grams.values():
            gram.merge(ranks)

    @cached_property
    def _matrices(self) -> dict[tuple[Any, ...], Tensor]:
        """Return the sums, once all batches are in."""
        return {key: _without_tiny(gram.matrix) for key, gram in self._grams.items()}

    def matrix(self, layer: str) -> Tensor:
        """Return the sum of x x^T of a layer's inputs, [groups, depth, depth]."""
        return self._matrices[self._geometry[layer]]

    def alive(self, layer: str) -> Tensor:
        """Return the same, with inputs that were always zero treated like the mean of the
        others, uncorrelated. Experts without any token stay at zero.
        """
        matrix = self.matrix(layer)
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        dead = diagonal == 0
        if self._is_routed(layer):
            dead &= ~dead.all(1, keepdim=True)
        if not bool(dead.any()) or bool(dead.all()):
            return matrix
        matrix = matrix.clone()
        matrix.diagonal(dim1=1, dim2=2)[dead] = diagonal[diagonal > 0].mean()
        return matrix

    @property
    def unrouted(self) -> list[str]:
        """Return a sentence for each Gram matrix of experts some of which had no tokens."""
        texts: list[str] = []
        for gram in self._grams.values():
            if gram.is_routed:
                texts += unrouted(gram.by_group)
        return texts

    def channel_size(self, channels: int, *, by_expert: bool) -> Tensor:
        """Return the root mean square of each channel of the value, or of each channel in the
        tokens of each expert. It is 0 for an expert without any.
        """
        key, gram = next(iter(self._grams.items()))
        squares = self._matrices[key].diagonal(dim1=1, dim2=2)
        if by_expert:
            tokens = torch.tensor(gram.by_group, device=squares.device).clamp_min(1)
            return (squares / tokens[:, None]).sqrt().flatten()
        if gram.is_routed:
            squares = squares.sum(0)
        else:
            squares = squares.reshape(channels, -1).mean(1)
        return (squares / gram.tokens).sqrt()

    def divided(self, layer: str, factors: Tensor) -> Tensor:
        """Return the matrix for the value with its channels divided by `factors`."""
        matrix = self.matrix(layer)
        groups, depth, _ = matrix.shape
        if self._is_routed(layer):
            columns = factors.view(-1, depth)
        else:
            columns = by_input(factors, groups, depth)
        return (matrix / columns[:, None]).div_(columns[:, :, None])

    def divide(self, factors: Tensor) -> None:
        """Replace all matrices by the divided ones; nothing may be added any more."""
        for key, name in self._first.items():
            self._matrices[key] = self.divided(name, factors)

    def _is_routed(self, layer: str) -> bool:
        return self._grams[self._geometry[layer]].is_routed


def observe_all(
    network: Network, batches: Iterable[Batch], watch: Watchers, ranks: Ranks
) -> None:
    """Run the network over a rank's share of the batches, one by one, and show its values.

    Raises:
        DataError: there is no batch, or one cannot run; it is named by its number.
    """
    number = -1
    for number, batch in enumerate(batches):
        if ranks.owns(number):
            with prefix_batch_errors(number, batch), torch.no_grad():
                network.observe(batch.args, batch.kwargs, watch)
    if number < 0:
        raise no_batches()


def watching(network: Network, layer: str, take: Callable[..., None]) -> tuple[str, Watchers]:
    """Return the node up to which a network has to run for the inputs of a layer, and watchers
    that call `take` with these inputs once for each batch.
    """
    sources = network.graph.by_name[layer].operands
    last = max(sources.values(), key=network.graph.index.__getitem__)
    if len(sources) == 1:
        return last, {last: take}
    seen: dict[str, Tensor] = {}

    def watch(key: str, value: Tensor) -> None:
        seen[key] = value
        if len(seen) == len(sources):
            operands = dict(seen)
            seen.clear()
            take(**operands)

    return last, {name: partial(watch, key) for key, name in sources.items()}


def _zeros(layer: nn.Module) -> Tensor:
    weight = layer.get_parameter("weight")
    groups, _, depth = matrix_shape(layer)
    return torch.zeros(groups, depth, depth, device=weight.device)


def _without_tiny(matrix: Tensor) -> Tensor:
    """Set inputs to zero, in place, whose squares float32 cannot distinguish."""
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    is_tiny = (diagonal > 0) & (diagonal < _MIN_SQUARE_SUM)
    if bool(is_tiny.any()):
        matrix.masked_fill_(is_tiny[:, :, None] | is_tiny[:, None, :], 0.0)
    return matrix


def quantized_layers(task: Task, group: InputGroup) -> list[str]:
    """Return the group's layers whose weights are rounded. Those with super-blocks keep the
    scales of a search of their own.
    """
    specs = {name: task.specs.get((name, "weights")) for name in group.layers}
    names = []
    for name, spec in specs.items():
        if spec is not None and spec.is_scaled and spec.scale_type != "superblock":
            names.append(name)
    return names


def deepest(network: Network, layers: Iterable[str]) -> int:
    """Return the largest number of inputs that an output of these layers is a sum of."""
    depths = [matrix_shape(network.layers[name])[2] for name in layers]
    return max(depths)


def geometry(layer: nn.Module) -> tuple[Any, ...]:
    """Return what is equal in layers that multiply the same patches of the value they read."""
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


def not_finite_input(layer: str, error: ObservationError) -> DataError:
    """Return the error about a value that a layer reads. The caller adds the batch."""
    if isinstance(error, NonFiniteError):
        text = (
            f"the input of {layer} has {error.nans} NaN and {error.infinities} infinite values"
        )
        return DataError(text, help="check that batch, and the weights of the layers before")
    return DataError(f"the input of {layer}: {error}", help="check that batch")


def unrouted(by_group: Sequence[int]) -> Iterator[str]:
    """Yield a sentence on the experts that had no tokens, if others had some.

    >>> print(*unrouted([3, 0]))  # doctest: +ELLIPSIS
    no token of the calibration data was routed to expert 1 (of 2), which stays at ...
    """
    missed = [f"expert {expert}" for expert, count in enumerate(by_group) if not count]
    if 0 < len(missed) < len(by_group):
        names = f"{first_names(missed)} (of {len(by_group)})"
        stay = "stays" if len(missed) == 1 else "stay"
        yield (
            f"no token of the calibration data was routed to {names}, which {stay} at "
            "round-to-nearest"
        )


def zero_channels(count: int) -> str:
    """Return the start of a sentence on input channels that were always zero.

    >>> zero_channels(1)
    '1 input channel was zero on the calibration data'
    """
    channels = "1 input channel was" if count == 1 else f"{count} input channels were"
    return f"{channels} zero on the calibration data"


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of `left` and `right` to `total`, float32, in place."""
    if left.dtype == torch.float32:
        # `addmm_` writes to a part of a matrix, `baddbmm_` to a copy
        total.addmm_(left, right)
    else:
        # Products of 16-bit values are exact in float32, and are summed up there
        total.add_(torch.mm(left, right, out_dtype=torch.float32))


def _parts(
    layer: nn.Module, x: Tensor, routing: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield what the layer multiplies its weight with, in parts: groups, and for these [groups,
    positions, depth].
    """
    if isinstance(layer, ExpertLinear):
        for expert, rows in enumerate(layer.rows(**(routing or {}))):
            yield [expert], x[rows][None]
    elif is_linear(layer):
        yield [0], x.reshape(1, -1, x.shape[-1])
    else:
        for part in windows(layer, x, _MAX_PATCH_VALUES):
            yield range(len(part)), part
