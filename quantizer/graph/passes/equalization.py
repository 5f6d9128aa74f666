"""Equalization on pairs of layers between which factors pass: so that one scale per tensor fits
all channels.

Channel i is divided by s_i in the first layer of a pair and multiplied by s_i in the second,
s_i = sqrt(r1_i r2_i) / r2_i with r a channel's range in either, until both are equally wide.
Then high biases move to the next layer, where a channel lies so far from zero that most of its
range is never used: relu(x - c) is relu(x) - c where x >= c; with c = max(0, mean - 3 std) of
what a folded batch norm promises, that is all but 0.13 % of normally distributed values.
Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.1 (2019).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.axis_rules import is_padded
from quantizer.graph.channel_labels import NONE, passes_shifts
from quantizer.graph.edits import by_channel, rescaled, with_weights
from quantizer.graph.folds import Folds, Source
from quantizer.graph.ir import Change, Graph, Node

NAME = "cross_layer_equalization"
TOLERANCE = 1 / 64
"""Factors below 2^TOLERANCE, one percent, count as none."""
SWEEPS = 200
STDS = 3


@dataclass(frozen=True)
class Pair:
    """`second` alone reads what `first` makes, by way of `between`; `channels` are those of
    `first` in its input.
    """

    first: Node
    second: Node
    between: tuple[Node, ...]
    channels: tuple[int, ...]


def find_pairs(graph: Graph) -> tuple[Pair, ...]:
    """All pairs in execution order; layers whose parameters anyone else uses are in none."""
    layers = [node for node in graph.nodes if _is_scalable(graph, node)]
    if len(layers) < 2:
        return ()
    folds = Folds(graph)
    return tuple(pair for node in layers if (pair := _pair(folds, node)) is not None)


def _is_scalable(graph: Graph, node: Node) -> bool:
    """A convolution or linear layer that owns its parameters."""
    owns = node.is_multiplying and set(node.inputs) == {"input"}
    return (
        owns and node.is_float and all(graph.uses[path] == 1 for path in node.params.values())
    )


def _pair(folds: Folds, first: Node) -> Pair | None:
    """The layer with the one that reads its channels and nothing else, if no other does."""
    flow, nodes = folds.flow(Source("layer", first)), folds.graph.by_name
    if flow.mixed or len(flow.ends) != 1:
        return None
    [(end, channels)] = flow.ends.items()
    if NONE in channels or not _is_scalable(folds.graph, nodes[end]):
        return None
    return Pair(first, nodes[end], tuple(nodes[name] for name in flow.between), channels)


def cross_layer_equalization(graph: Graph) -> Graph:
    """The graph with equalized pairs, once; a channel that is zero on one side keeps its
    weights.

    No sweep changes more than the one before it, as the logarithm of a factor is a mean of
    maxima of its neighbours'.
    """
    if any(change.rewrite == NAME for change in graph.changes):
        return graph
    pairs = find_pairs(graph)
    layers: dict[str, _Layer] = {}
    for pair in pairs:  # a layer is the second of one pair before it is the first of another
        first = layers.get(pair.first.name) or _Layer(graph, pair.first)
        layers |= {
            pair.first.name: first,
            pair.second.name: _Layer(graph, pair.second, pair, first),
        }
    for _ in range(SWEEPS):
        if (
            max(
                (_balance(layers[p.first.name], layers[p.second.name]) for p in pairs),
                default=0.0,
            )
            < TOLERANCE
        ):
            break
    exponents = {
        (pair.first.name, pair.second.name): _exponent(layers[pair.first.name].outputs)
        for pair in pairs
    }
    done = [
        Change(NAME, pair, exponent)
        for pair, exponent in exponents.items()
        if exponent >= TOLERANCE
    ]
    if not done:
        return graph
    normal = {
        name: (mean * factors, std * factors)
        for name, (mean, std) in graph.normal.items()
        for factors in [layers[name].outputs.to(mean.device) if name in layers else 1.0]
    }
    graph = with_weights(
        graph, {name: layer.parameters(graph) for name, layer in layers.items()}
    )
    return graph.replaced(normal=normal, changes=(*graph.changes, *done))


class _Layer:
    """The ranges of a layer's channels while they change, and the factors so far; float64 on
    the CPU.

    `pair` is the one whose second layer this is, `before` the first; columns of one of its
    channels count as one. `values` is the range of the outputs as a folded batch norm promises
    it, else the bias, in units in which the largest one is as wide as the largest weight. It
    counts as a weight does: else a channel with hardly any weight would be blown up until its
    values need all of the activation's range.
    """

    def __init__(
        self, graph: Graph, node: Node, pair: Pair | None = None, before: _Layer | None = None
    ) -> None:
        self.node = node
        largest = by_channel(node, graph.weight(node)).abs().amax(3)
        groups, outputs, inputs = largest.shape
        # Of each input
        self.channels = torch.tensor(pair.channels) if pair else torch.arange(groups * inputs)
        count = len(before.outputs) if before else groups * inputs
        self.columns = self.channels
        if groups == 1:
            index = self.channels.to(largest.device).expand(largest.shape)
            largest = largest.new_zeros(1, outputs, count).scatter_reduce(
                2, index, largest, "amax"
            )
            self.columns = torch.arange(count)
        self.weight = largest.to("cpu", torch.float64)  # [groups, outputs, columns]
        self.outputs: Tensor = torch.ones(groups * outputs, dtype=torch.float64)
        self.inputs = torch.ones(count, dtype=torch.float64)
        values = (
            graph.tensors[node.params["bias"]].abs()
            if "bias" in node.params
            else torch.zeros_like(self.outputs)
        )
        if node.name in graph.normal:
            mean, std = graph.normal[node.name]
            values = mean.abs() + STDS * std
        values = values.to("cpu", torch.float64)
        self.values = (
            values * self.weight.max() / values.max().clamp(min=torch.finfo(torch.float64).tiny)
        )

    def parameters(self, graph: Graph) -> dict[str, Tensor]:
        """The scaled weight and bias."""
        tensors = {key: graph.tensors[path] for key, path in self.node.params.items()}
        found = {
            "weight": rescaled(
                self.node, tensors["weight"], self.outputs, self.inputs[self.channels]
            )
        }
        if "bias" in tensors:
            found["bias"] = (tensors["bias"] * self.outputs.to(tensors["bias"].device)).to(
                tensors["bias"].dtype
            )
        return found


def _balance(first: _Layer, second: _Layer) -> float:
    """Make the channels of a pair equally wide; returns the exponent of the largest factor."""
    r1 = torch.maximum(first.weight.amax(2).flatten(), first.values)
    r2 = torch.zeros_like(second.inputs).scatter_reduce(
        0, second.columns, second.weight.amax(1).flatten(), "amax"
    )
    squared = r1 / r2  # r2 is 0 for a channel that is not read
    s = torch.where((squared > 0) & squared.isfinite(), squared.sqrt(), 1.0)
    first.outputs *= 1 / s
    first.values *= 1 / s
    first.weight *= (1 / s).reshape(len(first.weight), -1, 1)
    second.inputs *= s
    second.weight *= s[second.columns].reshape(len(second.weight), 1, -1)
    return _exponent(s)


def _exponent(factors: Tensor) -> float:
    """The largest exponent of two, of either sign."""
    return float(factors.log2().abs().max())


@dataclass(frozen=True, eq=False)
class Absorption:
    """A shift of a layer's bias that the next layer can take up.

    Args:
        pair: both layers.
        high: what each output channel of the first is lowered by, float64 [channels], some of
            it above 0.
    """

    pair: Pair
    high: Tensor

    @property
    def high_inputs(self) -> Tensor:
        """Return by how much each input channel of the second layer is lowered, float64
        [channels].
        """
        return self.high[list(self.pair.channels)]


def find_absorptions(graph: Graph) -> Iterator[Absorption]:
    """Yield all shifts that are exact up to the values below them, in execution order."""
    for pair in find_pairs(graph):
        if pair.first.name not in graph.normal or not _shifts(pair):
            continue
        mean, std = graph.normal[pair.first.name]
        bottom = (mean - STDS * std).clamp(min=0)
        top = mean + STDS * std
        # A shift takes no more of a channel than lowers the range of all channels together.
        high = torch.minimum(bottom, (top - (top - bottom).max()).clamp(min=0))
        if high.any():
            yield Absorption(pair, high)


def absorb_high_biases(graph: Graph, refused: Collection[str] = ()) -> Graph:
    """Return the graph with high biases moved to the layers after them.

    Args:
        graph: after the fold of batch norms, which say where values lie.
        refused: first layers whose biases stay, as a check on data has decided.
    """
    normal = dict(graph.normal)
    biases: dict[str, Tensor] = {}
    changes = []
    for absorption in find_absorptions(graph):
        first, second = absorption.pair.first, absorption.pair.second
        if first.name in refused:
            continue
        high = absorption.high
        mean, std = normal[first.name]
        normal[first.name] = mean - high, std
        biases[first.name] = biases.get(first.name, _bias(graph, first)) - high
        taps = by_channel(second, graph.weight(second)).sum(3, dtype=torch.float64)
        response = taps @ absorption.high_inputs.reshape(len(taps), -1, 1)
        biases[second.name] = biases.get(second.name, _bias(graph, second)) + response.flatten()
        count = int(high.count_nonzero())
        changes.append(Change("absorb_high_biases", (first.name, second.name), count))
    if not changes:
        return graph
    rounded = {}
    for name, bias in biases.items():
        dtype = graph.weight(graph.by_name[name]).dtype
        rounded[name] = {"bias": bias.to(dtype)}
    changed = with_weights(graph, rounded)
    return changed.replaced(normal=normal, changes=(*graph.changes, *changes))


def _shifts(pair: Pair) -> bool:
    """Whether a shift after the first layer goes through a ReLU and reaches every input of the
    second unchanged.
    """
    others = [node for node in pair.between if not node.row.rectifies]
    through = len(others) < len(pair.between) and all(map(passes_shifts, others))
    return through and not is_padded(pair.second.attrs) and not pair.second.row.transposed


def _bias(graph: Graph, node: Node) -> Tensor:
    """The layer's bias in float64, zeros if it has none."""
    if "bias" in node.params:
        return graph.tensors[node.params["bias"]].double()
    weight = graph.weight(node)
    return torch.zeros(
        by_channel(node, weight).shape[:2].numel(), dtype=torch.float64, device=weight.device
    )
