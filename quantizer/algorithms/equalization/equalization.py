"""Equalize the channels of two layers, so that one scale per tensor suits all channels. Factors
must pass through everything between the layers.

Channel i is divided by s_i in the first layer of a pair and multiplied by s_i in the second,
until both are equally wide. Here s_i = sqrt(r1_i r2_i) / r2_i, with r a channel's range in
either layer.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.1 (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.channels.labels import NONE
from quantizer.graph.edits import by_channel, rescale_weight, with_weights
from quantizer.graph.ir import Graph, Node, PassChange
from quantizer.graph.structure.folds import Folds, Source

MIN_EXPONENT = 1 / 64
"""Factors below two to this power, one percent, count as none."""
_EQUALIZATION = "cross_layer_equalization"
_MAX_SWEEPS = 200
_STDS = 3


@dataclass(frozen=True)
class LayerPair:
    """Two layers. Only `second` reads the output of `first`.

    Args:
        first: the layer that is divided.
        second: the layer that is multiplied.
        between: the nodes through which the channels go.
        channels: for each input channel of `second` the output channel of `first`.
    """

    first: Node
    second: Node
    between: tuple[Node, ...]
    channels: tuple[int, ...]


def find_pairs(graph: Graph) -> tuple[LayerPair, ...]:
    """Return all pairs in execution order, without layers whose parameters are shared."""
    layers = [node for node in graph.nodes if _is_scalable(graph, node)]
    if len(layers) < 2:
        return ()
    folds = Folds(graph)
    pairs: list[LayerPair] = []
    for first in layers:
        flow = folds.flow(Source("layer", first))
        if flow.mixed or len(flow.ends) != 1:
            continue
        [(end, channels)] = flow.ends.items()
        second = graph.by_name[end]
        if NONE not in channels and _is_scalable(graph, second):
            between = tuple(graph.by_name[name] for name in flow.between)
            pairs.append(LayerPair(first, second, between, channels))
    return tuple(pairs)


def _is_scalable(graph: Graph, node: Node) -> bool:
    """Return whether a node is a convolution or linear layer that shares no parameters."""
    if not node.is_multiplying or node.inputs.keys() != {"input"}:
        return False
    return node.is_float and all(graph.uses[path] == 1 for path in node.params.values())


def cross_layer_equalization(graph: Graph) -> Graph:
    """Return the graph with equalized pairs, itself if it has been equalized before.

    A channel that is zero on one side keeps its weights. No sweep changes more than the one
    before it, because the logarithm of a factor is a mean of maxima of its neighbours'.
    """
    if any(change.rewrite == _EQUALIZATION for change in graph.changes):
        return graph
    pairs = find_pairs(graph)
    layers: dict[str, _LayerRanges] = {}
    # A layer is the second of one pair before it is the first of another
    for pair in pairs:
        if pair.first.name not in layers:
            layers[pair.first.name] = _LayerRanges(graph, pair.first)
        before = layers[pair.first.name]
        layers[pair.second.name] = _LayerRanges(graph, pair.second, pair, before)
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for pair in pairs:
            exponent = _balance(layers[pair.first.name], layers[pair.second.name])
            largest = max(largest, exponent)
        if largest < MIN_EXPONENT:
            break
    changes: list[PassChange] = []
    for pair in pairs:
        exponent = _largest_exponent(layers[pair.first.name].outputs)
        if exponent >= MIN_EXPONENT:
            names = (pair.first.name, pair.second.name)
            changes.append(PassChange(_EQUALIZATION, names, exponent))
    if not changes:
        return graph
    normal = dict(graph.normal)
    for name, (mean, std) in normal.items():
        if name in layers:
            factors = layers[name].outputs.to(mean.device)
            normal[name] = (mean * factors, std * factors)
    weights = {name: layer.parameters(graph) for name, layer in layers.items()}
    changed = with_weights(graph, weights)
    return changed.replaced(normal=normal, changes=(*graph.changes, *changes))


class _LayerRanges:
    """The ranges of a layer's channels while they change, and the factors so far; float64 on
    the CPU.

    `values` is the range of the outputs, as a folded batch norm states it, else the bias. Its
    unit makes the largest one as wide as the largest weight. It counts as a weight does.
    Otherwise a channel with tiny weights would be scaled up until its values need all of the
    activation's range.

    Args:
        graph: of the layer.
        node: the layer.
        pair: of which the layer is the second. Columns of one of its channels count as one.
        before: the first layer of that pair.
    """

    def __init__(
        self,
        graph: Graph,
        node: Node,
        pair: LayerPair | None = None,
        before: _LayerRanges | None = None,
    ) -> None:
        self.node = node
        largest = by_channel(node, graph.weight(node)).abs().amax(3)
        groups, outputs, inputs = largest.shape
        count = groups * inputs
        self.channels = torch.arange(count)
        if pair is not None and before is not None:
            self.channels = torch.tensor(pair.channels)
            count = len(before.outputs)
        self.columns = self.channels
        if groups == 1:
            index = self.channels.to(largest.device).expand(largest.shape)
            columns = largest.new_zeros(1, outputs, count)
            largest = columns.scatter_reduce(2, index, largest, "amax")
            self.columns = torch.arange(count)
        self.weight = largest.to("cpu", torch.float64)  # [groups, outputs, columns]
        self.outputs: Tensor = torch.ones(groups * outputs, dtype=torch.float64)
        self.inputs = torch.ones(count, dtype=torch.float64)
        values = torch.zeros_like(self.outputs)
        if node.name in graph.normal:
            mean, std = graph.normal[node.name]
            values = mean.abs() + _STDS * std
        elif "bias" in node.params:
            values = graph.tensors[node.params["bias"]].abs()
        values = values.to("cpu", torch.float64)
        widest = values.max().clamp(min=torch.finfo(torch.float64).tiny)
        self.values = values * self.weight.max() / widest

    def parameters(self, graph: Graph) -> dict[str, Tensor]:
        """Return the scaled weight and bias."""
        weight = graph.weight(self.node)
        inputs = self.inputs[self.channels]
        tensors = {"weight": rescale_weight(self.node, weight, self.outputs, inputs)}
        if "bias" in self.node.params:
            bias = graph.tensors[self.node.params["bias"]]
            scaled = bias * self.outputs.to(bias.device)
            tensors["bias"] = scaled.to(bias.dtype)
        return tensors


def _balance(first: _LayerRanges, second: _LayerRanges) -> float:
    """Make the channels of a pair equally wide, and return the exponent of the largest
    factor.
    """
    r1 = torch.maximum(first.weight.amax(2).flatten(), first.values)
    widths = second.weight.amax(1).flatten()
    r2 = torch.zeros_like(second.inputs).scatter_reduce(0, second.columns, widths, "amax")
    squared = r1 / r2  # r2 is 0 for a channel that is not read
    s = torch.where((squared > 0) & squared.isfinite(), squared.sqrt(), 1.0)
    first.outputs *= 1 / s
    first.values *= 1 / s
    first.weight *= (1 / s).reshape(len(first.weight), -1, 1)
    second.inputs *= s
    second.weight *= s[second.columns].reshape(len(second.weight), 1, -1)
    return _largest_exponent(s)


def _largest_exponent(factors: Tensor) -> float:
    """Return the largest exponent of two, of either sign."""
    return float(factors.log2().abs().max())
