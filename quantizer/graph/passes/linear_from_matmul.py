"""A product with a trained matrix is a linear layer: GPT-2 writes its layers as `addmm` with the weight transposed."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, rewire

_MATRIX = {"addmm": "mat2", "mm": "mat2", "matmul": "other"}
_FACTOR = {"addmm": "mat1", "mm": "input", "matmul": "input"}


def linear_from_matmul(graph: Graph) -> Graph:
    """The graph with each `x @ weight (+ bias)` of trained `weight` [in, out] and `bias` [out] as a linear layer."""
    tensors = dict(graph.tensors)
    made = {node.name: _linear(graph, node, tensors) for node in graph.nodes if _is_linear(graph, node)}
    if not made:
        return graph
    moved = {
        node.name: graph.consumers[node.name][0]
        for node in graph.nodes
        if node.op == "parameter" and all(reader in made for reader in graph.consumers[node.name])
    }
    nodes = tuple(made.get(node.name, node) for node in graph.nodes)
    return rewire(graph.replaced(nodes=nodes, tensors=tensors), moved, moved)


def _is_linear(graph: Graph, node: Node) -> bool:
    if node.op not in _MATRIX or not _is_trained(graph, node.inputs.get(_MATRIX[node.op]), 2):
        return False
    scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
    return node.op != "addmm" or (not scaled and _is_trained(graph, node.inputs.get("input"), 1))


def _is_trained(graph: Graph, value: object, dims: int) -> bool:
    source = graph.by_name[value.name] if isinstance(value, Ref) else None
    return source is not None and source.op == "parameter" and len(source.shape or ()) == dims


def _linear(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> Node:
    """The layer; its weight, [out, in], is added to `tensors`."""
    path = graph.by_name[node.inputs[_MATRIX[node.op]].name].params["weight"]
    tensors[f"{path}@transposed"] = graph.tensors[path].t().contiguous()
    params = {"weight": f"{path}@transposed"}
    if node.op == "addmm":
        params["bias"] = graph.by_name[node.inputs["input"].name].params["weight"]
    inputs = {"input": node.inputs[_FACTOR[node.op]]}
    return dataclasses.replace(node, op="linear", target="aten.linear.default", inputs=inputs, attrs={}, params=params)
