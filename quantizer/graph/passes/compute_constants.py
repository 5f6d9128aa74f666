"""Passes that remove operators without effect in inference, and compute once what the model
computes from its own tensors in each call.

The latter are weights, as weight_norm and spectral_norm make them, and results of rare
operators, such as an inverse matrix. Few engines know these operators.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quantizer.graph.ir import Graph, Node, Ref, depending, map_refs, references, rewire
from quantizer.graph.ops import OPS
from quantizer.graph.targets import call


def remove_dropout(graph: Graph) -> Graph:
    """Return the graph without dropout layers."""
    moved: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "dropout":
            moved[node.name] = next(node.refs())
    return rewire(graph, moved, moved) if moved else graph


def compute_weights(graph: Graph) -> Graph:
    """Return the graph with computed weights and biases as parameters of their layers, without
    the nodes that computed them.
    """
    fixed = fixed_nodes(graph)
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    values: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for node in graph.nodes:
        computed = _computed_parameters(graph, node, fixed)
        for name in computed.values():
            tensors[name] = value_of(graph, name, values).clone()
            owners[name] = node.name
        inputs = {key: value for key, value in node.inputs.items() if key not in computed}
        params = {**node.params, **computed}
        nodes.append(replace(node, inputs=inputs, params=params))
    if not owners:
        return graph
    computed_once = graph.replaced(nodes=tuple(nodes), tensors=tensors)
    return without_idle(computed_once, fixed, owners)


def fixed_nodes(graph: Graph) -> set[str]:
    """Return the nodes whose values follow from the model's own tensors."""
    fixed: set[str] = set()
    for node in graph.nodes:
        is_operator = node.target.split(".")[0] in ("aten", "operator")
        is_computed = bool(node.inputs) and not node.params and is_operator
        if node.is_tensor or (is_computed and fixed.issuperset(node.refs())):
            fixed.add(node.name)
    return fixed


def _computed_parameters(graph: Graph, node: Node, fixed: set[str]) -> dict[str, str]:
    """Return the nodes that compute a layer's weight and bias, by role."""
    computed: dict[str, str] = {}
    if not node.row.weight:
        return computed
    for role in ("weight", "bias"):
        value = node.inputs.get(role)
        if (
            isinstance(value, Ref)
            and value.name in fixed
            and graph.by_name[value.name].is_float
        ):
            computed[role] = value.name
    return computed


def value_of(graph: Graph, name: str, values: dict[str, Any]) -> Any:
    """Return what a fixed node computes; `values` holds what is known already."""
    if name not in values:
        node = graph.by_name[name]
        if node.is_tensor:
            values[name] = graph.weight(node)
        else:
            inputs = map_refs(node.inputs, lambda read: value_of(graph, read, values))
            with torch.no_grad():
                values[name] = call(node.target, {**node.attrs, **inputs})
    return values[name]


def without_idle(graph: Graph, fixed: set[str], owners: dict[str, str]) -> Graph:
    """Return the graph without fixed nodes that nothing reads any more.

    `absorbed` names for each of them the layer for which it computed something.
    """
    read = set(references(graph.output))
    moved: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.name in fixed and node.name not in read:
            moved[node.name] = owners.get(node.name, "")
        else:
            read.update(node.refs())
    # What computed a weight goes where the weight went
    for node in reversed(graph.nodes):
        for name in node.refs():
            if moved.get(name) == "":
                moved[name] = moved[node.name]
    return rewire(graph, moved, moved)


def compute_constants(graph: Graph) -> Graph:
    """Return the graph with parameters and constants instead of such results, without the
    nodes that computed them.
    """
    fixed = fixed_nodes(graph)
    rare = _following(graph, fixed, lambda node: node.op not in OPS)
    if not rare:
        return graph
    read = set(references(graph.output))
    for node in graph.nodes:
        if node.name not in fixed:
            read.update(node.refs())
    trained = _following(graph, fixed, lambda node: node.op == "parameter")
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


def _following(graph: Graph, fixed: set[str], begins: Callable[[Node], bool]) -> set[str]:
    """Return the fixed nodes of a kind, such as those of rare operators, and those whose values
    depend on them.
    """
    starts = {name for name in fixed if begins(graph.by_name[name])}
    return depending(graph, starts) & fixed


def _tensor(node: Node, *, is_trained: bool) -> Node:
    """Return the node as one that gives a tensor of the node's name."""
    op = "constant"
    if is_trained:
        op = "parameter"
    params = {"weight": node.name}
    return replace(node, op=op, target=op, inputs={}, attrs={}, params=params)
