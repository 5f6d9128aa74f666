"""Weights that stay float if a group size does not divide them. A network has few such values,
and groups would hardly have more than one of them.
"""

from quantizer.graph.ir import Graph, Node
from quantizer.plan.floating import derived_layers

_ENTRIES = ("input", "module_input")


def is_apart(graph: Graph, node: Node) -> bool:
    """Return whether the layer is a convolution whose kernels read one channel each, or an
    embedding of positions.
    """
    if node.row.spatial:
        is_transposed = node.row.transposed
        return not is_transposed and graph.weight(node).shape[1] == 1
    return node.row.looks_up and not _looks_up_tokens(graph, node)


def _looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Return whether the indices are those of an input, at most moved. Indices that are
    computed, from these or from sizes, are positions.
    """
    source = graph.source(node)
    while source is not None and source.row.only_moves:
        source = graph.source(source)
    if source is None or source.op in _ENTRIES:
        return True
    return source.name not in derived_layers(graph)
