"""Passes that make linear layers of products with trained matrices, and give a bias that is
computed anew for each input a layer of its own.

GPT-2 writes its layers as `addmm` with a weight [in, out], Falcon as `x @ weight.T`.
transformers multiplies tokens with the matrices of their experts. It calls `grouped_mm` with
tokens sorted by expert, or `bmm` with a matrix picked for each token.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, rewire
from quantizer.storage.deferred_tensor import apply_deferred

_PRODUCTS = {"addmm": ("mat1", "mat2"), "mm": ("input", "mat2"), "matmul": ("input", "other")}
"""The arguments of each product: the input and the matrix."""
TRANSPOSED = "@transposed"
"""Ends the path of a tensor that the model has with its last two axes swapped."""
STACKED = "@experts"
"""Ends the path of a tensor [experts * out, in] that the model has with three axes."""
_GROUPED = {"transformers_grouped_mm_fallback": "weight", "_grouped_mm": "mat2"}
"""Products with tokens sorted by expert, and the argument for the matrices."""
_STACK_RANK = 3


def separate_biases(graph: Graph) -> Graph:
    """Return the graph with each layer `x` of a computed bias as `x` without a bias, read by
    `x_add`.

    A convolution's bias is brought into the shape [channels, 1, …] by `x_bias`.
    """
    layers = {node.name for node in graph.nodes if _has_computed_bias(node)}
    if not layers:
        return graph

    def through(name: str) -> Ref:
        return Ref(f"{name}_add") if name in layers else Ref(name)

    changed = graph.reading(through)
    nodes: list[Node] = []
    for node in changed.nodes:
        if node.name in layers:
            nodes += _parts(node)
        else:
            nodes.append(node)
    return changed.replaced(nodes=tuple(nodes))


def _has_computed_bias(node: Node) -> bool:
    return node.is_multiplying and isinstance(node.inputs.get("bias"), Ref)


def _parts(node: Node) -> Iterator[Node]:
    """Yield the layer without its bias, the reshape of a convolution's bias, and the sum."""
    inputs = dict(node.inputs)
    bias = inputs.pop("bias")
    yield replace(node, inputs=inputs)
    computed = replace(node, attrs={}, params={})
    if node.row.spatial:
        shape = [-1, *[1] * node.row.spatial]
        name = f"{node.name}_bias"
        channels = (node.shape or ())[-1 - node.row.spatial]
        yield replace(
            computed,
            name=name,
            op="reshape",
            target="aten.reshape.default",
            inputs={"input": bias},
            attrs={"shape": shape},
            shape=(channels, *shape[1:]),
            open_axes=(),
        )
        bias = Ref(name)
    yield replace(
        computed,
        name=f"{node.name}_add",
        op="add",
        target="aten.add.Tensor",
        inputs={"input": Ref(node.name), "other": bias},
    )


def linear_from_matmul(graph: Graph) -> Graph:
    """Return the graph with each `x @ weight (+ bias)` of trained tensors as a linear layer.

    The weight is [in, out], or the transpose of a matrix [out, in]; the bias is [out]. Trained
    tensors and transpositions that only such layers read are removed.
    """
    layers: dict[str, Node] = {}
    tensors = dict(graph.tensors)
    for node in graph.nodes:
        layer = _linear(graph, node)
        if layer is None:
            continue
        layers[node.name] = layer
        path = layer.params["weight"]
        if path not in tensors:
            stored = tensors[path.removesuffix(TRANSPOSED)]
            tensors[path] = stored.t().contiguous()
    if not layers:
        return graph
    moved = _operands_of(graph, layers)
    absorbed: dict[str, str] = {}
    for name, layer_name in moved.items():
        if graph.by_name[name].op == "parameter":
            absorbed[name] = layer_name
    changed = graph.mapped(lambda node: layers.get(node.name, node))
    return rewire(changed.replaced(tensors=tensors), moved, absorbed)


def _linear(graph: Graph, node: Node) -> Node | None:
    """Return the linear layer that computes a node, None if no such layer does.

    The path of its weight ends in `TRANSPOSED` if the model has that as [in, out].
    """
    if node.op not in _PRODUCTS:
        return None
    input_key, matrix_key = _PRODUCTS[node.op]
    matrix = _trained_matrix(graph, node.inputs.get(matrix_key), 2)
    if matrix is None:
        return None
    params = dict(matrix.node.params)
    if not matrix.is_flipped:
        params["weight"] += TRANSPOSED
    if node.op == "addmm":
        bias = _trained_tensor(graph, node.inputs.get("input"), 1)
        is_scaled = any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta"))
        if bias is None or is_scaled:
            return None
        params["bias"] = bias.params["weight"]
    return replace(
        node,
        op="linear",
        target="aten.linear.default",
        inputs={"input": node.inputs[input_key]},
        attrs={},
        params=params,
    )


def _operands_of(graph: Graph, layers: Mapping[str, Node]) -> dict[str, str]:
    """Return the trained tensors and their transpositions that only layers read, each with the
    first of these layers.
    """
    operands: dict[str, str] = {}
    # Backwards, so that a transposition comes before the tensor that it reads
    for node in reversed(graph.nodes):
        is_matrix = _trained_matrix(graph, Ref(node.name), 2) is not None
        if not is_matrix and node.op != "parameter":
            continue
        readers = graph.consumers[node.name]
        if readers and all(reader in layers or reader in operands for reader in readers):
            operands[node.name] = operands.get(readers[0], readers[0])
    return operands


@dataclass(frozen=True)
class _TrainedMatrix:
    """A trained tensor that a product reads.

    Args:
        node: gives the tensor.
        is_flipped: whether the product reads it with its last two axes swapped.
    """

    node: Node
    is_flipped: bool


def _trained_matrix(graph: Graph, value: object, rank: int) -> _TrainedMatrix | None:
    """Return the trained tensor of this rank that a value is, or is the transpose of."""
    matrix = _trained_tensor(graph, value, rank)
    if matrix is not None:
        return _TrainedMatrix(matrix, is_flipped=False)
    node = graph.by_name[value.name] if isinstance(value, Ref) else None
    if node is None or not _swaps_last_axes(node, rank):
        return None
    matrix = _trained_tensor(graph, node.inputs.get("input"), rank)
    return None if matrix is None else _TrainedMatrix(matrix, is_flipped=True)


def _trained_tensor(graph: Graph, value: object, rank: int) -> Node | None:
    """Return the trained tensor of this rank that a value is, None if it is none."""
    if not isinstance(value, Ref):
        return None
    node = graph.by_name[value.name]
    return node if node.op == "parameter" and node.rank == rank else None


def _swaps_last_axes(node: Node, rank: int) -> bool:
    """Return whether a node swaps the last two axes of a tensor and moves no other axis."""
    before_last, last = rank - 2, rank - 1
    if node.op == "transpose":
        swapped = {node.attrs.get("dim0", -1) % rank, node.attrs.get("dim1", -2) % rank}
        return swapped == {before_last, last}
    if node.op == "permute":
        order = [axis % rank for axis in node.attrs["dims"]]
        return order == [*range(before_last), last, before_last]
    return node.op == "mT" or (node.op == "numpy_T" and rank == 2)


@dataclass(frozen=True)
class _ExpertProduct:
    """A product that one layer of experts computes.

    Args:
        last: the node that gives the product.
        matrix: the trained tensor, [experts, in, out], or [experts, out, in] if `is_flipped`.
        inputs: those of the layer.
        is_flipped: whether the model multiplies with the transpose of the matrices.
    """

    last: Node
    matrix: Node
    inputs: Mapping[str, Any]
    is_flipped: bool


def linear_of_experts(graph: Graph) -> Graph:
    """Return the graph with each product of tokens with trained matrices of their experts as a
    linear layer.

    The layer's weight is [experts * out, in]. The layer has the name of the tensor, by which
    users know it. Nodes that nothing reads any more are removed.
    """
    products: list[_ExpertProduct] = []
    for node in graph.nodes:
        product = _grouped(graph, node) or _picked(graph, node)
        if product is not None:
            products.append(product)
    if not products:
        return graph
    moved = _idle(graph, products)
    tensors = dict(graph.tensors)
    counts: Counter[str] = Counter()
    layers: dict[str, Node] = {}
    renamed: dict[str, str] = {}
    for product in products:
        last = product.last.name
        name = product.matrix.name if product.matrix.name in moved else last
        count = counts[name]
        counts[name] += 1
        if count:
            name = f"{name}.{count}"
        layer = _layer(graph, product, tensors)
        layers[last] = replace(layer, name=name)
        if name != last:
            renamed[last] = name
    nodes = tuple(layers.get(node.name, node) for node in graph.nodes if node.name not in moved)
    absorbed = {name: layers[last].name for name, last in moved.items() if name not in counts}
    changed = graph.replaced(nodes=nodes, tensors=tensors)
    return rewire(changed, renamed, absorbed | renamed)


def _grouped(graph: Graph, node: Node) -> _ExpertProduct | None:
    """Return the product of tokens that are sorted by expert.

    The layer's input "ends" says where the tokens of each expert end.
    """
    key = _GROUPED.get(node.op)
    if key is None or node.inputs.keys() != {"input", key, "offs"}:
        return None
    if any(value is not None for name, value in node.attrs.items() if name != "out_dtype"):
        return None
    matrix = _trained_matrix(graph, node.inputs[key], _STACK_RANK)
    if matrix is None:
        return None
    inputs = {"input": node.inputs["input"], "ends": node.inputs["offs"]}
    return _ExpertProduct(node, matrix.node, inputs, matrix.is_flipped)


def _picked(graph: Graph, node: Node) -> _ExpertProduct | None:
    """Return the product of each token with a matrix that is picked for it.

    The model makes a matrix of each token for `bmm` with an axis of size one, which `node`
    removes again. The layer's input "picks" is the expert of each token.
    """
    product = graph.source(node)
    if node.op != "squeeze" or product is None or product.op != "bmm":
        return None
    if graph.consumers[product.name] != (node.name,):
        return None
    for matrices, tokens, axis in (("input", "mat2", 2), ("mat2", "input", 1)):
        pick = graph.by_name[product.inputs[matrices].name]
        token = graph.by_name[product.inputs[tokens].name]
        if pick.op != "index" or token.op != "unsqueeze" or token.rank != _STACK_RANK:
            continue
        matrix = _trained_tensor(graph, pick.inputs.get("input"), _STACK_RANK)
        if matrix is None:
            continue
        axes = {token.attrs["dim"] % _STACK_RANK, node.attrs["dim"] % _STACK_RANK}
        picks = pick.inputs["indices"]
        if axes == {axis} and len(picks) == 1:
            inputs = {"input": token.inputs["input"], "picks": picks[0]}
            return _ExpertProduct(node, matrix, inputs, axis == 2)
    return None


def _layer(graph: Graph, product: _ExpertProduct, tensors: dict[str, Tensor]) -> Node:
    """Return the layer of a product, and add its weight to `tensors`."""
    stack = graph.weight(product.matrix)
    experts, outputs, inputs = stack.shape
    path = product.matrix.params["weight"]
    rows = _rows
    if not product.is_flipped:
        inputs, outputs = outputs, inputs
        path += TRANSPOSED
        rows = _columns
    path += STACKED
    if path not in tensors:
        tensors[path] = apply_deferred(stack, (experts * outputs, inputs), rows)
    return replace(
        product.last,
        op="expert_linear",
        target="experts.linear",
        inputs=product.inputs,
        attrs={"groups": experts},
        params={"weight": path},
    )


def _rows(stack: Tensor) -> Tensor:
    return stack.flatten(0, 1)


def _columns(stack: Tensor) -> Tensor:
    return stack.mT.flatten(0, 1)


def _idle(graph: Graph, products: list[_ExpertProduct]) -> dict[str, str]:
    """Return the nodes that only the products read and that their layers do not read, each with
    the last node of a product.
    """
    lasts = {product.last.name for product in products}
    moved: dict[str, str] = {}
    for product in products:
        read = {value.name for value in product.inputs.values()}
        pending = list(product.last.refs())
        while pending:
            name = pending.pop()
            readers = graph.consumers[name]
            if name in read or not all(
                reader in lasts or reader in moved for reader in readers
            ):
                continue
            moved[name] = product.last.name
            pending += graph.by_name[name].refs()
    return moved
