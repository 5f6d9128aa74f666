"""A product of each token with the trained matrix of its expert is a linear layer of experts:
transformers writes it as `grouped_mm` of tokens that are sorted by expert, or as `bmm` with a
matrix picked for each token.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantizer.graph.ir import Graph, Node, rewire
from quantizer.graph.passes.linear_from_matmul import TRANSPOSED, flipped, trained
from quantizer.storage.deferred_tensor import derived

STACKED = "@experts"
"""Ends the path of a tensor [experts * out, in] that the model has with three axes."""
_GROUPED = {"transformers_grouped_mm_fallback": "weight", "_grouped_mm": "mat2"}
"""Products with tokens sorted by expert, and what they call the matrices."""
_AXES = 3


@dataclass(frozen=True)
class Product:
    """What the node `last` makes: `inputs` times `matrix`, [experts, in, out], or [experts,
    out, in] if `flipped`.
    """

    last: Node
    matrix: Node
    inputs: Mapping[str, Any]
    flipped: bool


def linear_of_experts(graph: Graph) -> Graph:
    """The graph with each product of tokens with trained matrices of their experts as a linear
    layer.

    Its weight is [experts * out, in]. It has the name of the tensor, by which people know it;
    nodes that nothing reads any more are gone.
    """
    products = [
        found
        for node in graph.nodes
        if (found := _grouped(graph, node) or _picked(graph, node))
    ]
    if not products:
        return graph
    moved, tensors, count, made = (
        _served(graph, products),
        dict(graph.tensors),
        Counter[str](),
        dict[str, Node](),
    )
    for product in products:
        name = product.matrix.name if product.matrix.name in moved else product.last.name
        made[product.last.name] = _layer(
            graph, product, f"{name}.{count[name]}" if count[name] else name, tensors
        )
        count[name] += 1
    nodes = tuple(made.get(node.name, node) for node in graph.nodes if node.name not in moved)
    renamed = {last: layer.name for last, layer in made.items() if last != layer.name}
    gone = {name: made[last].name for name, last in moved.items() if name not in count}
    return rewire(graph.replaced(nodes=nodes, tensors=tensors), renamed, gone | renamed)


def _grouped(graph: Graph, node: Node) -> Product | None:
    """The product of tokens that are sorted by expert; "ends" says where those of each end."""
    value, own = node.inputs.get(_GROUPED.get(node.op, "")), {"input", "offs"}
    flips = flipped(graph, value, _AXES)
    matrix = flips or trained(graph, value, _AXES)
    plain = all(argument is None for key, argument in node.attrs.items() if key != "out_dtype")
    if (
        matrix is None
        or not plain
        or len(node.inputs) != len(own) + 1
        or not own <= node.inputs.keys()
    ):
        return None
    inputs = {"input": node.inputs["input"], "ends": node.inputs["offs"]}
    return Product(node, matrix, inputs, flips is not None)


def _picked(graph: Graph, node: Node) -> Product | None:
    """The product of each token with a matrix that is picked for it, by "picks", without the
    axis of size one that makes a matrix of a token.
    """
    source = graph.source(node)
    if (
        node.op != "squeeze"
        or source is None
        or source.op != "bmm"
        or graph.consumers[source.name] != (node.name,)
    ):
        return None
    for matrices, tokens, axis in (("input", "mat2", 2), ("mat2", "input", 1)):
        pick, row = (
            graph.by_name[value.name]
            for value in (source.inputs[matrices], source.inputs[tokens])
        )
        matrix = trained(graph, pick.inputs.get("input"), _AXES) if pick.op == "index" else None
        if (
            matrix is None
            or row.op != "unsqueeze"
            or {row.attrs["dim"] % _AXES, node.attrs["dim"] % _AXES} != {axis}
        ):
            continue
        [*picks] = pick.inputs["indices"]
        if len(picks) == 1 and row.rank == _AXES:
            return Product(
                node, matrix, {"input": row.inputs["input"], "picks": picks[0]}, axis == 2
            )
    return None


def _layer(graph: Graph, product: Product, name: str, tensors: dict[str, Tensor]) -> Node:
    """The layer of a product; its weight is added to `tensors`."""
    stack, path = graph.weight(product.matrix), product.matrix.params["weight"]
    experts, *sizes = stack.shape
    outputs, inputs = sizes if product.flipped else sizes[::-1]
    path += STACKED if product.flipped else f"{TRANSPOSED}{STACKED}"
    if path not in tensors:
        tensors[path] = derived(
            stack, (experts * outputs, inputs), _rows if product.flipped else _columns
        )
    changes: dict[str, Any] = {"name": name, "op": "expert_linear", "target": "experts.linear"}
    params, attrs = {"weight": path}, {"groups": experts}
    return dataclasses.replace(
        product.last, **changes, inputs=product.inputs, attrs=attrs, params=params
    )


def _rows(stack: Tensor) -> Tensor:
    return stack.flatten(0, 1)


def _columns(stack: Tensor) -> Tensor:
    return stack.mT.flatten(0, 1)


def _served(graph: Graph, products: list[Product]) -> dict[str, str]:
    """Nodes that products alone read, and now read in another way, each with one that reads
    it.
    """
    last = {product.last.name for product in products}
    read = {
        product.last.name: {each.name for each in product.inputs.values()}
        for product in products
    }
    moved: dict[str, str] = {}
    for product in products:
        waiting = list(product.last.refs())
        while waiting:
            name = waiting.pop()
            readers = graph.consumers[name]
            if name in read[product.last.name] or not all(
                each in last or each in moved for each in readers
            ):
                continue
            moved[name] = product.last.name
            waiting += graph.by_name[name].refs()
    return moved
