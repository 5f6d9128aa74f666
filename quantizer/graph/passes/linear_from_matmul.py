"""A pass that turns products with a trained matrix into linear layers. GPT-2 writes its layers
as `addmm` with a weight [in, out], Falcon as `x @ weight.T`.
"""

from dataclasses import replace

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, rewire

_PRODUCTS = {"addmm": ("mat1", "mat2"), "mm": ("input", "mat2"), "matmul": ("input", "other")}
"""The arguments of each product: the input and the matrix."""
_TRANSPOSITIONS = ("transpose", "permute", "numpy_T", "mT")
TRANSPOSED = "@transposed"
"""Ends the path of a tensor that the model has with its last two axes swapped."""


def linear_from_matmul(graph: Graph) -> Graph:
    """Return the graph with each `x @ weight (+ bias)` of trained tensors as a linear layer.

    The weight is [in, out], or the transpose of a matrix [out, in]; the bias is [out].
    """
    tensors = dict(graph.tensors)
    layers: dict[str, Node] = {}
    for node in graph.nodes:
        layer = _linear(graph, node, tensors)
        if layer is not None:
            layers[node.name] = layer
    if not layers:
        return graph
    moved: dict[str, str] = {}
    absorbed: dict[str, str] = {}
    # Backwards, so that a transposition comes before the parameter that it reads
    for node in reversed(graph.nodes):
        readers = graph.consumers[node.name]
        is_trained = node.op == "parameter"
        if not is_trained and flipped(graph, Ref(node.name), 2) is None:
            continue
        if readers and all(reader in layers or reader in moved for reader in readers):
            moved[node.name] = moved.get(readers[0], readers[0])
            if is_trained:
                absorbed[node.name] = moved[node.name]
    changed = graph.mapped(lambda node: layers.get(node.name, node))
    return rewire(changed.replaced(tensors=tensors), moved, absorbed)


def trained_tensor(graph: Graph, value: object, rank: int) -> Node | None:
    """Return the trained tensor of this rank that a value is, None if it is none."""
    if not isinstance(value, Ref):
        return None
    node = graph.by_name[value.name]
    return node if node.op == "parameter" and node.rank == rank else None


def flipped(graph: Graph, value: object, rank: int) -> Node | None:
    """Return the trained tensor of which a value is the transpose of the last two axes."""
    node = graph.by_name[value.name] if isinstance(value, Ref) else None
    if node is None or node.op not in _TRANSPOSITIONS:
        return None
    swapped = {node.attrs.get("dim0", -1) % rank, node.attrs.get("dim1", -2) % rank}
    axes = [*range(rank)]
    order = [*axes[:-2], rank - 1, rank - 2]
    default = axes[::-1] if node.op == "numpy_T" else order
    dims = [axis % rank for axis in node.attrs.get("dims", default)]
    if dims != order or swapped != {rank - 1, rank - 2}:
        return None
    return trained_tensor(graph, node.inputs.get("input"), rank)


def _linear(graph: Graph, node: Node, tensors: dict[str, Tensor]) -> Node | None:
    """Return the linear layer that computes a node, None if no such layer does.

    The layer's weight, [out, in], is added to `tensors` if the model has it transposed.
    """
    if node.op not in _PRODUCTS:
        return None
    input_key, matrix_key = _PRODUCTS[node.op]
    value = node.inputs.get(matrix_key)
    params: dict[str, str] = {}
    transposed = flipped(graph, value, 2)
    matrix = transposed or trained_tensor(graph, value, 2)
    if matrix is None:
        return None
    params["weight"] = matrix.params["weight"]
    if node.op == "addmm":
        bias = trained_tensor(graph, node.inputs.get("input"), 1)
        is_scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
        if bias is None or is_scaled:
            return None
        params["bias"] = bias.params["weight"]
    if transposed is None:
        params["weight"] += TRANSPOSED
        tensors[params["weight"]] = graph.weight(matrix).t().contiguous()
    return replace(
        node,
        op="linear",
        target="aten.linear.default",
        inputs={"input": node.inputs[input_key]},
        attrs={},
        params=params,
    )
