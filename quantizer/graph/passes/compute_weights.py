"""A weight that the model computes from trained tensors alone (weight_norm, spectral_norm) is
computed once.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, map_refs, references, rewire
from quantizer.graph.targets import call

_KEYS = ("weight", "bias")


def compute_weights(graph: Graph) -> Graph:
    """The graph whose layers own the weights and biases that were computed for them; what
    computed them is gone.
    """
    fixed = _fixed(graph)
    tensors, nodes = dict(graph.tensors), list[Node]()
    done: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for node in graph.nodes:
        read = {
            key: node.inputs[key].name for key in _KEYS if isinstance(node.inputs.get(key), Ref)
        }
        computed = {
            key: name
            for key, name in read.items()
            if name in fixed and graph.by_name[name].is_float
        }
        if node.row.weight and node.op != "parameter" and computed:
            for name in computed.values():
                tensors[name] = _value(graph, name, done).clone()
                owners[name] = node.name
            inputs = {key: value for key, value in node.inputs.items() if key not in computed}
            node = dataclasses.replace(node, inputs=inputs, params={**node.params, **computed})
        nodes.append(node)
    if not owners:
        return graph
    return _without_idle(graph.replaced(nodes=tuple(nodes), tensors=tensors), fixed, owners)


def _fixed(graph: Graph) -> set[str]:
    """Nodes whose value follows from the model's own tensors."""
    fixed: set[str] = set()
    for node in graph.nodes:
        own = node.op in ("parameter", "constant")
        derived = bool(node.inputs) and not node.params and set(node.refs()) <= fixed
        if own or (derived and node.target.split(".")[0] in ("aten", "operator")):
            fixed.add(node.name)
    return fixed


def _value(graph: Graph, name: str, done: dict[str, Any]) -> Tensor:
    """What a fixed node gives."""
    if name not in done:
        node = graph.by_name[name]
        if node.op in ("parameter", "constant"):
            done[name] = next(graph.tensors[path] for path in node.params.values())
        else:
            inputs = {
                key: map_refs(value, lambda ref: _value(graph, ref, done))
                for key, value in node.inputs.items()
            }
            with torch.no_grad():
                done[name] = call(node.target, {**node.attrs, **inputs})
    value: Tensor = done[name]
    return value


def _without_idle(graph: Graph, fixed: set[str], owners: dict[str, str]) -> Graph:
    """Without fixed nodes that nothing reads any more; a layer's name stands for what was
    computed for it.
    """
    read = set(references(graph.output))
    moved: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.name in fixed and node.name not in read:
            moved[node.name] = owners.get(node.name, "")
        else:
            read.update(node.refs())
    # What a computed weight was made of goes where the weight went
    for node in reversed(graph.nodes):
        for name in node.refs():
            if moved.get(name) == "":
                moved[name] = moved[node.name]
    return rewire(graph, moved, moved)
