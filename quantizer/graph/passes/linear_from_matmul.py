"""A product with a trained matrix is a linear layer: GPT-2 writes its layers as `addmm` with a weight [in, out], Falcon
as `x @ weight.T`."""

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
    made = {node.name: layer for node in graph.nodes if (layer := _linear(graph, node, tensors))}
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


def _trained(graph: Graph, value: object, dims: int) -> Node | None:
    source = graph.by_name[value.name] if isinstance(value, Ref) else None
    return source if source and source.op == "parameter" and source.rank == dims else None


def _flipped(graph: Graph, node: Node) -> Node | None:
    """The trained matrix whose transpose this node is."""
    if node.op not in _FLIPS:
        return None
    attrs = node.attrs
    flips = attrs.get("dims", (1, 0))[0] % 2 and (attrs.get("dim0", 1) - attrs.get("dim1", 0)) % 2
    return _trained(graph, node.inputs.get("input"), 2) if flips else None


def _linear(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> Node | None:
    """The layer that the node is; its weight, [out, in], is added to `tensors` where it is not there."""
    value = node.inputs.get(_MATRIX.get(node.op, ""))
    flipped = _flipped(graph, graph.by_name[value.name]) if isinstance(value, Ref) else None
    matrix = flipped or _trained(graph, value, 2)
    bias = _trained(graph, node.inputs.get("input"), 1) if node.op == "addmm" else None
    scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
    if matrix is None or (node.op == "addmm" and (scaled or bias is None)):
        return None
    params = {"weight": matrix.params["weight"]}
    if flipped is None:
        params["weight"] += "@transposed"
        tensors[params["weight"]] = graph.weight(matrix).t().contiguous()
    if bias is not None:
        params["bias"] = bias.params["weight"]
    inputs = {"input": node.inputs[_FACTOR[node.op]]}
    return dataclasses.replace(node, op="linear", target="aten.linear.default", inputs=inputs, attrs={}, params=params)
