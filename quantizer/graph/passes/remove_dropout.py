"""Dropout does nothing in inference; it leaves the graph."""

from __future__ import annotations

from quantizer.graph.ir import Graph, rewire


def remove_dropout(graph: Graph) -> Graph:
    """The graph without dropout layers; their readers read what dropout read."""
    moved = {node.name: next(node.refs()) for node in graph.nodes if node.op == "dropout"}
    return rewire(graph, moved, moved) if moved else graph
