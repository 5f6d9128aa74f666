"""A product with a trained matrix is a linear layer: GPT-2 writes its layers as `addmm` with a
weight [in, out], Falcon as `x @ weight.T`.
"""

import dataclasses

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, rewire

_MATRIX = {"addmm": "mat2", "mm": "mat2", "matmul": "other"}
_FLIPS = ("transpose", "permute", "numpy_T", "mT")
_FACTOR = {"addmm": "mat1", "mm": "input", "matmul": "input"}
TRANSPOSED = "@transposed"
"""Ends the path of a tensor that the model has with its last two axes the other way round."""


def linear_from_matmul(graph: Graph) -> Graph:
    """The graph with each `x @ weight (+ bias)` of trained `weight` [in, out] and `bias` [out]
    as a linear layer.

    The weight may also be the transpose of a trained matrix [out, in].
    """
    tensors = dict(graph.tensors)
    made = {
        node.name: layer for node in graph.nodes if (layer := _linear(graph, node, tensors))
    }
    if not made:
        return graph
    moved: dict[str, str] = {}
    for node in reversed(graph.nodes):  # a transpose goes before the parameter that it reads
        readers, gives = (
            graph.consumers[node.name],
            node.op == "parameter" or flipped(graph, Ref(node.name), 2),
        )
        if gives and all(each in made or each in moved for each in readers):
            moved[node.name] = moved.get(readers[0], readers[0])
    layers = graph.mapped(lambda node: made.get(node.name, node)).replaced(tensors=tensors)
    absorbed = {
        name: taker for name, taker in moved.items() if graph.by_name[name].op == "parameter"
    }
    return rewire(layers, moved, absorbed)


def trained(graph: Graph, value: object, dims: int) -> Node | None:
    """The trained tensor of so many axes that a value is."""
    source = graph.by_name[value.name] if isinstance(value, Ref) else None
    return source if source and source.op == "parameter" and source.rank == dims else None


def flipped(graph: Graph, value: object, dims: int) -> Node | None:
    """The trained tensor that a value is with its last two axes the other way round."""
    node = graph.by_name[value.name] if isinstance(value, Ref) else None
    if node is None or node.op not in _FLIPS:
        return None
    last = [*range(dims - 2), dims - 1, dims - 2]
    order = [
        axis % dims
        for axis in node.attrs.get("dims", range(dims)[::-1] if node.op == "numpy_T" else last)
    ]
    swapped = {node.attrs.get("dim0", -1) % dims, node.attrs.get("dim1", -2) % dims}
    return (
        trained(graph, node.inputs.get("input"), dims)
        if order == last and swapped == {*last[-2:]}
        else None
    )


def _linear(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> Node | None:
    """The layer that the node is; its weight, [out, in], is added to `tensors` where it is not
    there.
    """
    value = node.inputs.get(_MATRIX.get(node.op, ""))
    flips = flipped(graph, value, 2)
    matrix = flips or trained(graph, value, 2)
    bias = trained(graph, node.inputs.get("input"), 1) if node.op == "addmm" else None
    scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
    if matrix is None or (node.op == "addmm" and (scaled or bias is None)):
        return None
    params = {"weight": matrix.params["weight"]}
    if flips is None:
        params["weight"] += TRANSPOSED
        tensors[params["weight"]] = graph.weight(matrix).t().contiguous()
    if bias is not None:
        params["bias"] = bias.params["weight"]
    inputs = {"input": node.inputs[_FACTOR[node.op]]}
    return dataclasses.replace(
        node, op="linear", target="aten.linear.default", inputs=inputs, attrs={}, params=params
    )
