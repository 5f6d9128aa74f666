"""Pairs of layers where a factor on a channel of the first one can be undone in the second. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.graph.channel_labels import NONE
from quantizer.graph.folds import Folds, Source
from quantizer.graph.ir import Graph, Node


@dataclass(frozen=True)
class Pair:
    """`second` alone reads what `first` makes, by way of `between`; `channels` are those of `first` in its input."""

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
    return owns and node.is_float and all(graph.uses[path] == 1 for path in node.params.values())


def _pair(folds: Folds, first: Node) -> Pair | None:
    """The layer with the one that reads its channels and nothing else, if no other does."""
    flow, nodes = folds.flow(Source("layer", first)), folds.graph.by_name
    if flow.mixed or len(flow.ends) != 1:
        return None
    [(end, channels)] = flow.ends.items()
    if NONE in channels or not _is_scalable(folds.graph, nodes[end]):
        return None
    return Pair(first, nodes[end], tuple(nodes[name] for name in flow.between), channels)
