"""A product with a trained matrix is a linear layer: GPT-2 writes its layers as `addmm` with a weight [in, out], Falcon
as `x @ weight.T`."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, rewire

_MATRIX = {"addmm": "mat2", "mm": "mat2", "matmul": "other"}
_FLIPS = ("transpose", "permute", "numpy_T", "mT")
_FACTOR = {"addmm": "mat1", "mm": "input", "matmul": "input"}


def linear_from_matmul(graph: Graph) -> Graph:
    """The graph with each `x @ weight (+ bias)` of trained `weight` [in, out] and `bias` [out] as a linear layer.

    The weight may also be the transpose of a trained matrix [out, in].
    """
    tensors = dict(graph.tensors)
    made = {node.name: _linear(graph, node, tensors) for node in graph.nodes if _is_linear(graph, node)}
    if not made:
        return graph
    moved: dict[str, str] = {}
    for node in reversed(graph.nodes):  # a transpose goes before the parameter that it reads
        readers = graph.consumers[node.name]
        if (node.op == "parameter" or _flipped(graph, node)) and all(each in made or each in moved for each in readers):
            moved[node.name] = moved.get(readers[0], readers[0])
    layers = graph.mapped(lambda node: made.get(node.name, node)).replaced(tensors=tensors)
    absorbed = {name: taker for name, taker in moved.items() if graph.by_name[name].op == "parameter"}
    return rewire(layers, moved, absorbed)


def _is_linear(graph: Graph, node: Node) -> bool:
    if node.op not in _MATRIX or _matrix(graph, node) is None:
        return False
    scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
    return node.op != "addmm" or (not scaled and _trained(graph, node.inputs.get("input"), 1) is not None)


def _trained(graph: Graph, value: object, dims: int) -> Node | None:
    source = graph.by_name[value.name] if isinstance(value, Ref) else None
    return source if source and source.op == "parameter" and len(source.shape or ()) == dims else None


def _matrix(graph: Graph, node: Node) -> tuple[Node, bool] | None:
    """The parameter that a product multiplies with, and whether it is [out, in], transposed on the way."""
    value = node.inputs.get(_MATRIX[node.op])
    own = _flipped(graph, graph.by_name[value.name]) if isinstance(value, Ref) else None
    found = own or _trained(graph, value, 2)
    return (found, own is not None) if found else None


def _flipped(graph: Graph, node: Node) -> Node | None:
    """The trained matrix whose transpose this node is."""
    if node.op not in _FLIPS:
        return None
    attrs = node.attrs
    flips = attrs.get("dims", (1, 0))[0] % 2 and (attrs.get("dim0", 1) - attrs.get("dim1", 0)) % 2
    return _trained(graph, node.inputs.get("input"), 2) if flips else None


def _linear(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> Node:
    """The layer; its weight, [out, in], is added to `tensors` where it is not there."""
    matrix = _matrix(graph, node)
    assert matrix is not None
    path, is_flipped = matrix[0].params["weight"], matrix[1]
    if not is_flipped:
        tensors[f"{path}@transposed"] = graph.tensors[path].t().contiguous()
    params = {"weight": path if is_flipped else f"{path}@transposed"}
    if node.op == "addmm":
        params["bias"] = graph.by_name[node.inputs["input"].name].params["weight"]
    inputs = {"input": node.inputs[_FACTOR[node.op]]}
    return dataclasses.replace(node, op="linear", target="aten.linear.default", inputs=inputs, attrs={}, params=params)
