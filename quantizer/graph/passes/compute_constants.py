"""A pass that computes results of rare operators once where they follow from the model's own
tensors, such as an inverse matrix. Few engines know these operators.
"""

from dataclasses import replace
from typing import Any

from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.ops import OPS
from quantizer.graph.passes.compute_weights import fixed_nodes, value_of, without_idle


def compute_constants(graph: Graph) -> Graph:
    """Return the graph with parameters and constants instead of such results, without the
    nodes that computed them.
    """
    fixed = fixed_nodes(graph)
    rare = _rare(graph, fixed)
    if not rare:
        return graph
    read = set(references(graph.output))
    for node in graph.nodes:
        if node.name not in fixed:
            read.update(node.refs())
    trained = _trained(graph, fixed)
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    values: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for node in graph.nodes:
        name = node.name
        is_read = name in rare and name in read
        if is_read and node.dtype is not None and not node.dtype.is_complex:
            value = value_of(graph, name, values)
            tensors[name] = value.clone()
            owners.update(dict.fromkeys(node.refs(), name))
            node = _tensor(node, is_trained=name in trained)
        nodes.append(node)
    computed_once = graph.replaced(nodes=tuple(nodes), tensors=tensors)
    return without_idle(computed_once, fixed, owners)


def _rare(graph: Graph, fixed: set[str]) -> set[str]:
    """Return the fixed nodes that a rare operator computes, or that follow from one."""
    rare: set[str] = set()
    for node in graph.nodes:
        is_rare = node.op not in OPS
        follows = not rare.isdisjoint(node.refs())
        if node.name in fixed and (is_rare or follows):
            rare.add(node.name)
    return rare


def _trained(graph: Graph, fixed: set[str]) -> set[str]:
    """Return the fixed nodes that are parameters of the model, or follow from one."""
    trained: set[str] = set()
    for node in graph.nodes:
        is_parameter = node.op == "parameter"
        follows = not trained.isdisjoint(node.refs())
        if node.name in fixed and (is_parameter or follows):
            trained.add(node.name)
    return trained


def _tensor(node: Node, *, is_trained: bool) -> Node:
    """Return the node as one that gives a tensor of the node's name."""
    op = "constant"
    if is_trained:
        op = "parameter"
    params = {"weight": node.name}
    return replace(node, op=op, target=op, inputs={}, attrs={}, params=params)
