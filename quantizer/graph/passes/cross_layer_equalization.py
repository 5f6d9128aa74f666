"""Cross-layer equalization: pairs of layers share the burden of wide channels, so that one scale per tensor fits all.

Channel i is divided by s_i in the first layer of a pair and multiplied by s_i in the second, s_i = sqrt(r1_i r2_i) /
r2_i with r a channel's range in either, until both are equally wide. Source: Nagel et al., "Data-Free Quantization
Through Weight Equalization and Bias Correction", sections 4.1.1 and 4.1.2 (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.graph.edits import by_channel, rescaled, with_weights
from quantizer.graph.ir import Change, Graph, Node
from quantizer.graph.passes.pairs import Pair, find_pairs

NAME = "cross_layer_equalization"
TOLERANCE = 1 / 64
"""Factors below 2^TOLERANCE, one percent, count as none."""
SWEEPS = 200
STDS = 3


def cross_layer_equalization(graph: Graph) -> Graph:
    """The graph with equalized pairs, once; a channel that is zero on one side keeps its weights.

    No sweep changes more than the one before it, as the logarithm of a factor is a mean of maxima of its neighbours'.
    """
    if any(change.rewrite == NAME for change in graph.changes):
        return graph
    pairs = find_pairs(graph)
    layers = _layers(graph, pairs)
    for _ in range(SWEEPS):
        if max((_balance(layers[p.first.name], layers[p.second.name]) for p in pairs), default=0.0) < TOLERANCE:
            break
    exponents = {(pair.first.name, pair.second.name): _exponent(layers[pair.first.name].outputs) for pair in pairs}
    done = [Change(NAME, pair, exponent) for pair, exponent in exponents.items() if exponent >= TOLERANCE]
    if not done:
        return graph
    normal = {
        name: (mean * layers[name].outputs, std * layers[name].outputs) if name in layers else (mean, std)
        for name, (mean, std) in graph.normal.items()
    }
    graph = with_weights(graph, {name: layer.parameters(graph) for name, layer in layers.items()})
    return graph.replaced(normal=normal, changes=(*graph.changes, *done))


class _Layer:
    """The ranges of a layer's channels while they change, and the factors so far; float64 on the CPU.

    `pair` is the one whose second layer this is, `before` the first; columns of one of its channels count as one.
    `values` is the range of the outputs as a folded batch norm promises it, else the bias, in units in which the
    largest one is as wide as the largest weight. It counts as a weight does: else a channel with hardly any weight
    would be blown up until its values need all of the activation's range.
    """

    def __init__(self, graph: Graph, node: Node, pair: Pair | None = None, before: _Layer | None = None) -> None:
        self.node = node
        largest = by_channel(node, graph.weight(node)).abs().amax(3)
        groups, outputs, inputs = largest.shape
        self.channels = torch.tensor(pair.channels) if pair else torch.arange(groups * inputs)  # of each input
        count = len(before.outputs) if before else groups * inputs
        self.columns = self.channels
        if groups == 1:
            index = self.channels.to(largest.device).expand(largest.shape)
            largest = largest.new_zeros(1, outputs, count).scatter_reduce(2, index, largest, "amax")
            self.columns = torch.arange(count)
        self.weight = largest.to("cpu", torch.float64)  # [groups, outputs, columns]
        self.outputs: Tensor = torch.ones(groups * outputs, dtype=torch.float64)
        self.inputs = torch.ones(count, dtype=torch.float64)
        values = _values(graph, node)
        self.values = torch.zeros_like(self.outputs) if values is None else values.to("cpu", torch.float64)
        self.values = self.values * self.weight.max() / self.values.max().clamp(min=torch.finfo(torch.float64).tiny)

    def input_ranges(self) -> Tensor:
        """The range of each channel of the layer before; 0 for one that is not read."""
        return torch.zeros_like(self.inputs).scatter_reduce(0, self.columns, self.weight.amax(1).flatten(), "amax")

    def scale_outputs(self, factor: Tensor) -> None:
        self.outputs *= factor
        self.values *= factor
        self.weight *= factor.reshape(len(self.weight), -1, 1)

    def scale_inputs(self, factor: Tensor) -> None:
        self.inputs *= factor
        self.weight *= factor[self.columns].reshape(len(self.weight), 1, -1)

    def parameters(self, graph: Graph) -> dict[str, Tensor]:
        """The scaled weight and bias."""
        tensors = {key: graph.tensors[path] for key, path in self.node.params.items()}
        found = {"weight": rescaled(self.node, tensors["weight"], self.outputs, self.inputs[self.channels])}
        if "bias" in tensors:
            found["bias"] = (tensors["bias"] * self.outputs.to(tensors["bias"].device)).to(tensors["bias"].dtype)
        return found


def _values(graph: Graph, node: Node) -> Tensor | None:
    """The largest magnitude of each output channel, as far as the parameters show it."""
    if node.name in graph.normal:
        mean, std = graph.normal[node.name]
        return mean.abs() + STDS * std
    return graph.tensors[node.params["bias"]].abs() if "bias" in node.params else None


def _layers(graph: Graph, pairs: tuple[Pair, ...]) -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    for pair in pairs:  # a layer is the second of one pair before it is the first of another
        first = layers.get(pair.first.name) or _Layer(graph, pair.first)
        layers |= {pair.first.name: first, pair.second.name: _Layer(graph, pair.second, pair, first)}
    return layers


def _balance(first: _Layer, second: _Layer) -> float:
    """Make the channels of a pair equally wide; returns the exponent of the largest factor."""
    r1, r2 = torch.maximum(first.weight.amax(2).flatten(), first.values), second.input_ranges()
    squared = r1 / r2
    s = torch.where((squared > 0) & squared.isfinite(), squared.sqrt(), 1.0)
    first.scale_outputs(1 / s)
    second.scale_inputs(s)
    return _exponent(s)


def _exponent(factors: Tensor) -> float:
    """The largest exponent of two, of either sign."""
    return float(factors.log2().abs().max())
