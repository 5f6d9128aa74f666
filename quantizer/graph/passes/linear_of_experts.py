"""A pass that turns products of tokens with the trained matrices of their experts into linear
layers of experts.

transformers writes such a product as `grouped_mm` of tokens that are sorted by expert, or as
`bmm` with a matrix that is picked for each token.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quantizer.graph.ir import Graph, Node, rewire
from quantizer.graph.passes.linear_from_matmul import TRANSPOSED, flipped, trained_tensor
from quantizer.storage.deferred_tensor import apply_deferred

STACKED = "@experts"
"""Ends the path of a tensor [experts * out, in] that the model has with three axes."""
_GROUPED = {"transformers_grouped_mm_fallback": "weight", "_grouped_mm": "mat2"}
"""Products with tokens sorted by expert, and the argument for the matrices."""
_RANK = 3


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
    transposed = flipped(graph, node.inputs[key], _RANK)
    matrix = transposed or trained_tensor(graph, node.inputs[key], _RANK)
    if matrix is None:
        return None
    inputs = {"input": node.inputs["input"], "ends": node.inputs["offs"]}
    return _ExpertProduct(node, matrix, inputs, transposed is not None)


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
        if pick.op != "index" or token.op != "unsqueeze" or token.rank != _RANK:
            continue
        matrix = trained_tensor(graph, pick.inputs.get("input"), _RANK)
        if matrix is None:
            continue
        axes = {token.attrs["dim"] % _RANK, node.attrs["dim"] % _RANK}
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
