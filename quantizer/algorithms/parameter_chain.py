"""A trained tensor, or an expression of one alone such as `1 + weight`, as a function of that tensor."""

from __future__ import annotations

from torch import Tensor

from quantizer.graph.ir import Graph, Node
from quantizer.graph.targets import call

_LEAVES = ("parameter", "constant")


def leaf(graph: Graph, node: Node) -> Node | None:
    """The tensor of one axis that a chain of operators with one input begins with, if nobody else reads any of it."""
    while len(graph.consumers[node.name]) == 1 and node.op not in _LEAVES:
        sources = list(node.refs())
        if len(sources) != 1 or not node.target.startswith("aten."):
            return None
        node = graph.by_name[sources[0]]
    if node.op not in _LEAVES or len(graph.consumers[node.name]) != 1:
        return None
    return node if (node.shape or ())[-1:] == (graph.weight(node).numel(),) else None


def value(graph: Graph, node: Node, start: Tensor) -> Tensor:
    """What such a chain gives when its tensor is `start`."""
    if node.op in _LEAVES:
        return start
    ((key, source),) = node.inputs.items()
    result: Tensor = call(node.target, {**node.attrs, key: value(graph, graph.by_name[source.name], start)})
    return result
