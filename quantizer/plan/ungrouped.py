"""Weights that stay float where a group size does not divide them: a network has few such
values, and groups there would be no groups.
"""

from quantizer.graph.ir import Graph, Node
from quantizer.plan.floating import derived

_ENTRIES = ("input", "module_input")


def is_apart(graph: Graph, node: Node) -> bool:
    """Whether the layer is a convolution whose kernels read one channel each, or an embedding
    of positions.
    """
    if node.row.spatial:
        return not node.row.transposed and graph.weight(node).shape[1] == 1
    return node.row.looks_up and not _looks_up_tokens(graph, node)


def _looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Whether the indices are an input's, moved at most; what is computed of these, or of
    sizes, are positions.
    """
    source = graph.source(node)
    while source is not None and source.row.only_moves:
        source = graph.source(source)
    return source is None or source.op in _ENTRIES or source.name not in derived(graph)
