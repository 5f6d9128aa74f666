"""Computes once what a network's layers make of its own tensors, such as of positions. The
engines of phones multiply by inputs only.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

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
    watchers = {name: _stored(values, name) for name in names}
    with torch.no_grad():
        deployment.network().observe(deployment.args, deployment.kwargs, watchers)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in names:
            params = {"weight": node.name}
            node = replace(
                node, op="constant", target="constant", inputs={}, attrs={}, params=params
            )
        nodes.append(node)
    read = set(references(graph.output))
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in read or node.name not in fixed:
            read.update(node.refs())
            kept.append(node)
    folded = graph.replaced(nodes=tuple(kept[::-1]), tensors={**graph.tensors, **values})
    return replace(deployment, graph=folded, solution=_of_nodes(deployment, folded, names))


def _of_nodes(deployment: Deployment, graph: Graph, names: set[str]) -> Any:
    """Return the solution without what the folded layers have quantized."""
    solution = deployment.solution
    tensors = {}
    for (layer, role), tensor in solution.tensors.items():
        is_gone = layer not in graph.by_name or (layer in names and role != "activation")
        if not is_gone:
            tensors[layer, role] = tensor
    weights = {}
    for layer, parameters in solution.weights.items():
        if layer in graph.by_name and layer not in names:
            weights[layer] = parameters
    corrections = {}
    for layer, correction in solution.corrections.items():
        if layer in graph.by_name and layer not in names:
            corrections[layer] = correction
    return replace(solution, tensors=tensors, weights=weights, corrections=corrections)


def _stored(values: dict[str, Any], name: str) -> Callable[[Any], None]:
    """Return a function that keeps a value by name."""

    def store(value: Any) -> None:
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
        elif node.row.kind == "mac" or not multiplied.isdisjoint(node.refs()):
            multiplied.add(node.name)
    return {name for name in multiplied & read if graph.by_name[name].dtype is not None}
