"""Computes once what a network's layers make of its own tensors, such as of positions. The
engines of phones multiply by inputs only.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quantizer.calibration.solution import Solution
from quantizer.export.deployment import Deployment
from quantizer.graph.ir import Graph, Node, references


def fold_constants(deployment: Deployment) -> Deployment:
    """Return the deployment with constants instead of layers that follow from no input.

    They have the values of test mode.
    """
    graph = deployment.graph
    fixed = _fixed_nodes(graph)
    names = _folded(graph, fixed)
    if not names:
        return deployment
    values: dict[str, Any] = {}
    watchers: dict[str, Callable[[Any], None]] = {}
    for name in names:
        watchers[name] = _stored(values, name)
    network = deployment.network()
    with torch.no_grad():
        network.observe(deployment.args, deployment.kwargs, watchers)
    read = set(references(graph.output))
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in names:
            node = _constant(node)
        if node.name in read or node.name not in fixed:
            read.update(node.refs())
            nodes.append(node)
    nodes.reverse()
    tensors = dict(graph.tensors)
    tensors.update(values)
    folded = graph.replaced(nodes=tuple(nodes), tensors=tensors)
    solution = _of_nodes(deployment.solution, folded, names)
    return replace(deployment, graph=folded, solution=solution)


def _constant(node: Node) -> Node:
    """Return the node as one that gives a tensor of the node's name."""
    return replace(
        node,
        op="constant",
        target="constant",
        inputs={},
        attrs={},
        params={"weight": node.name},
    )


def _of_nodes(solution: Solution, graph: Graph, names: set[str]) -> Solution:
    """Return the solution without what the folded layers have quantized."""
    computing = graph.by_name.keys() - names
    tensors = dict(solution.tensors)
    for layer, role in solution.tensors:
        is_result = layer in names and role == "activation"
        if layer not in computing and not is_result:
            del tensors[layer, role]
    weights = dict(solution.weights)
    for layer in solution.weights:
        if layer not in computing:
            del weights[layer]
    corrections = dict(solution.corrections)
    for layer in solution.corrections:
        if layer not in computing:
            del corrections[layer]
    return replace(solution, tensors=tensors, weights=weights, corrections=corrections)


def _stored(values: dict[str, Any], name: str) -> Callable[[Any], None]:
    """Return a function that keeps a value by name."""

    def store(value: Any) -> None:
        """Keep a copy of a value."""
        values[name] = value.clone()

    return store


def _fixed_nodes(graph: Graph) -> set[str]:
    """Return the nodes whose values follow from the network's own tensors."""
    fixed: set[str] = set()
    for node in graph.nodes:
        if node.op != "input" and fixed.issuperset(node.refs()):
            fixed.add(node.name)
    return fixed


def _folded(graph: Graph, fixed: set[str]) -> set[str]:
    """Return the fixed tensors that the rest reads and that multiplications have made."""
    multiplied: set[str] = set()
    read = set(references(graph.output))
    for node in graph.nodes:
        if node.name not in fixed:
            read.update(node.refs())
            continue
        follows = not multiplied.isdisjoint(node.refs())
        if node.row.kind == "mac" or follows:
            multiplied.add(node.name)
    folded: set[str] = set()
    for name in multiplied & read:
        if graph.by_name[name].dtype is not None:
            folded.add(name)
    return folded
