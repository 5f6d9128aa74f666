"""High biases move to the next layer, where a channel lies so far from zero that most of its range is never used.

relu(x - c) is relu(x) - c where x >= c; with c = max(0, mean - 3 std) of what a folded batch norm promises, that is
all but 0.13 % of normally distributed values. Source: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction", section 4.1.3 (2019).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.graph.axis_rules import is_padded
from quantizer.graph.channel_labels import passes_shifts
from quantizer.graph.edits import by_channel, with_weights
from quantizer.graph.ir import Change, Graph, Node
from quantizer.graph.passes.pairs import Pair, find_pairs

STDS = 3


def absorb_high_biases(graph: Graph) -> Graph:
    """The graph with high biases moved to the layers after them, where that is exact up to the values below c."""
    normal, changes, biases = dict(graph.normal), list[Change](), dict[str, Tensor]()
    for pair in find_pairs(graph):
        first, second = pair.first, pair.second
        if first.name not in normal or not _shifts(pair):
            continue
        mean, std = normal[first.name]
        bottom, top = (mean - STDS * std).clamp(min=0), mean + STDS * std
        # A shift takes no more of a channel than lowers the range of all channels together.
        high = torch.minimum(bottom, (top - (top - bottom).max()).clamp(min=0))
        if high.any():
            normal[first.name] = mean - high, std
            biases[first.name] = biases.get(first.name, _bias(graph, first)) - high
            biases[second.name] = biases.get(second.name, _bias(graph, second)) + _response(graph, pair, high)
            changes.append(Change("absorb_high_biases", (first.name, second.name), int(high.count_nonzero())))
    if not changes:
        return graph
    rounded = {name: {"bias": bias.to(graph.weight(graph.by_name[name]).dtype)} for name, bias in biases.items()}
    return with_weights(graph, rounded).replaced(normal=normal, changes=(*graph.changes, *changes))


def _shifts(pair: Pair) -> bool:
    """Whether a shift after the first layer goes through a ReLU and reaches every input of the second unchanged."""
    others = [node for node in pair.between if not node.row.rectifies]
    through = len(others) < len(pair.between) and all(map(passes_shifts, others))
    return through and not is_padded(pair.second.attrs) and not pair.second.row.transposed


def _bias(graph: Graph, node: Node) -> Tensor:
    """The layer's bias in float64, zeros if it has none."""
    if "bias" in node.params:
        return graph.tensors[node.params["bias"]].double()
    weight = graph.weight(node)
    return torch.zeros(by_channel(node, weight).shape[:2].numel(), dtype=torch.float64, device=weight.device)


def _response(graph: Graph, pair: Pair, shift: Tensor) -> Tensor:
    """What the second layer makes of a constant in each channel of the first."""
    taps = by_channel(pair.second, graph.weight(pair.second)).sum(3, dtype=torch.float64)
    inputs = shift[list(pair.channels)].reshape(len(taps), -1, 1)
    return (taps @ inputs).flatten()
