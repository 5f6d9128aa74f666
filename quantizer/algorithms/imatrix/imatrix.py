"""Search the scales of groups for the least error of the layer's outputs, as llama.cpp does
with an importance matrix.

The squared error of a weight counts by the mean square of its input over the calibration data.
That is the diagonal of the inputs' Gram matrix, so inputs count as uncorrelated. The float
network runs once over the data.

Source: llama.cpp's imatrix; ggml's quantizers that take weights.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.algorithms.imatrix.settings import IMatrixConfig
from quantizer.config.model import QuantizationSpec
from quantizer.distributed import Ranks
from quantizer.layerwise.adjustment import (
    Adjustment,
    Remark,
    RoundedWeight,
    Task,
    apply_adjustment,
)
from quantizer.layerwise.gram import UNREACHED, not_finite_input, observe_all
from quantizer.layerwise.round_to_nearest import layer_qparams, nearest
from quantizer.nn.network import Network
from quantizer.numerics.granularity import scale_shape, to_rows
from quantizer.numerics.group_search import SearchedFormat, searched_scales
from quantizer.numerics.qparams import QParams
from quantizer.observers import NonFiniteError, searched_format
from quantizer.storage.deferred_tensor import loaded

_VALUES_AT_ONCE = 1 << 23
"""How many weights get their scales in one call."""
_UNSEARCHED = (
    "imatrix searches scales of formats of llama.cpp and of symmetric integers in groups, so "
    "its scales stay those of the weights alone"
)
_SHARED = (
    "its weight is used elsewhere, too, with other inputs; it stays at the search without data"
)


def imatrix(task: Task, settings: IMatrixConfig, adjustment: Adjustment) -> Adjustment:
    """Find the scales of weights in groups, and round the weights to nearest with them.

    Layers whose scales cannot be searched are left out. Those that no token reached keep the
    scales that are found without data.

    Raises:
        DataError: there is no batch, or a value in the network is not finite; layer and batch
            are named.
    """
    network = Network(apply_adjustment(task.graph, adjustment))
    search = _Search(task, network)
    for number, group in enumerate(task.structure.groups):
        if number < task.done:
            continue
        for name in group.layers:
            adjustment = search.with_rounded(name, adjustment)
        task.after_group(adjustment, number + 1)
    return adjustment


@dataclass(frozen=True)
class _SearchedLayer:
    """A layer whose scales are searched."""

    name: str
    source: str
    spec: QuantizationSpec
    format: SearchedFormat
    weight: Tensor


class _Search:
    """Finds the scales of layers, once the network has run over all batches."""

    def __init__(self, task: Task, network: Network) -> None:
        self._specs = task.specs
        self._shared: set[str] = set()
        self._layers: dict[str, _SearchedLayer] = {}
        readers: Counter[str] = Counter()
        for node in task.graph.nodes:
            readers.update(node.params.values())
        for group in task.structure.groups:
            for name in group.layers:
                layer = _searched_layer(task, network, name)
                if layer is None:
                    continue
                if readers[task.graph.by_name[name].params["weight"]] > 1:
                    self._shared.add(name)
                else:
                    self._layers[name] = layer
        sources: dict[str, str] = {}
        for name, layer in self._layers.items():
            sources.setdefault(layer.source, name)
        self._squares = _observed_squares(task, network, sources)

    def with_rounded(self, name: str, adjustment: Adjustment) -> Adjustment:
        """Return the adjustment with a layer's rounded weight, if it has one."""
        if name in self._shared:
            return adjustment.with_remarks(Remark(name, _SHARED, is_warning=False))
        layer = self._layers.get(name)
        if layer is None:
            spec = self._specs.get((name, "weights"))
            if spec is None or not spec.is_scaled:
                return adjustment
            return adjustment.with_remarks(Remark(name, _UNSEARCHED))
        squares = self._squares[layer.source]
        if not squares.count:
            return adjustment.with_remarks(Remark(name, UNREACHED))
        rounded = _rounded(layer, squares.mean().float())
        return adjustment.with_rounded({name: rounded.stored_like(layer.weight)})


def _searched_layer(task: Task, network: Network, name: str) -> _SearchedLayer | None:
    """Return a linear layer whose groups run along its inputs."""
    spec = task.specs.get((name, "weights"))
    layer = network.layers[name]
    if spec is None or not isinstance(layer, nn.Linear) or spec.ch_axis != 1:
        return None
    searched = searched_format(spec)
    if searched is None:
        return None
    [source] = task.graph.by_name[name].operands.values()
    return _SearchedLayer(name, source, spec, searched, layer.weight.detach())


class InputSquares:
    """Sums up the squares of each channel of a value, in float64 over batches.

    >>> squares = InputSquares()
    >>> squares.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> squares.mean().tolist()
    [5.0, 2.0]
    """

    def __init__(self) -> None:
        self._sum = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def add(self, value: Tensor) -> None:
        """Take in one batch, with channels along the last axis.

        Raises:
            NonFiniteError: it holds NaN or infinity.
        """
        rows = value.reshape(-1, value.shape[-1]).double()
        sums = rows.square().sum(0).cpu()
        if not bool(sums.isfinite().all()):
            raise NonFiniteError(value)
        self._sum = self._sum + sums
        self.count += len(rows)

    def mean(self) -> Tensor:
        """Return the mean square of each channel, float64."""
        return self._sum / max(self.count, 1)

    def merge(self, ranks: Ranks) -> None:
        """Take in what the other ranks have summed up."""
        parts = ranks.gather((self._sum, self.count), "squares of inputs")
        sums = [total for total, count in parts if count]
        if sums:
            self._sum = torch.stack(sums).sum(0)
        self.count = sum(count for _, count in parts)


def _observed_squares(
    task: Task, network: Network, sources: Mapping[str, str]
) -> dict[str, InputSquares]:
    """Return the squares of values of the network, over all batches of all ranks.

    `sources` has a layer that reads the value, for each.

    Raises:
        DataError: there is no batch, or a value is not finite.
    """
    squares = {source: InputSquares() for source in sources}
    watchers = {
        source: partial(_add, layer, squares[source]) for source, layer in sources.items()
    }
    observe_all(network, task.batches(), watchers, task.ranks)
    for row in squares.values():
        row.merge(task.ranks)
    return squares


def _add(layer: str, squares: InputSquares, value: Tensor) -> None:
    """Take in a value that a layer reads."""
    try:
        squares.add(value)
    except NonFiniteError as error:
        raise not_finite_input(layer, error) from error


def _rounded(layer: _SearchedLayer, mean_squares: Tensor) -> RoundedWeight:
    """Return the better one of two rounded weights: with scales that were searched with the
    mean squares of inputs, and without.
    """
    spec = layer.spec
    weight = loaded(layer.weight)
    importance = mean_squares.to(weight.device)
    qparams = layer_qparams(layer.name, spec, weight)
    rounded = nearest(weight, spec, qparams)
    before = _relative_error(weight, rounded, importance)
    after = before
    searched_qparams = _searched_qparams(layer, weight, importance)
    searched = nearest(weight, spec, searched_qparams)
    error = _relative_error(weight, searched, importance)
    if error < before:
        qparams = searched_qparams
        rounded = searched
        after = error
    on_cpu = qparams.to(torch.device("cpu"))
    return RoundedWeight(rounded, on_cpu, before, after)


def _searched_qparams(layer: _SearchedLayer, weight: Tensor, importance: Tensor) -> QParams:
    """Return the scales that are searched with the mean squares of inputs, some rows at a
    time.
    """
    cut = layer.spec.cut
    height = max(1, _VALUES_AT_ONCE // weight.shape[1])
    scales: list[Tensor] = []
    minima: list[Tensor] = []
    for part in torch.split(weight, height):
        scale, minimum = searched_scales(
            to_rows(part, cut), to_rows(importance.expand_as(part), cut), layer.format
        )
        scales.append(scale)
        minima.append(minimum)
    shape = scale_shape(tuple(weight.shape), cut)
    scale = torch.cat(scales).view(shape)
    if layer.format.row.has_minimum:
        return QParams(scale, torch.cat(minima).view(shape))
    return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))


def _relative_error(weight: Tensor, rounded: Tensor, importance: Tensor) -> float:
    """Return the weighted squared error as a share of the weighted squares."""
    difference = (weight.float() - rounded.float()).square_()
    error = (difference.sum(0, dtype=torch.float64) * importance).sum()
    energy = (weight.float().square().sum(0, dtype=torch.float64) * importance).sum()
    return float(error / energy.clamp(min=torch.finfo(torch.float64).tiny))
