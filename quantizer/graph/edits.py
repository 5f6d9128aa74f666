"""Changes to a traced graph: weights by their channels, other parameters, layers between a
value and its readers.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref, map_refs


@dataclass(frozen=True)
class Insertion:
    """A layer `name` that reads `source` and is read by `readers` in its place.

    `op` is "input_scale" (x * weight along axis `attrs["axis"]`) or "rotation" (see
    `nn.rescale`); `weight` is its tensor, `attrs` its constants.
    """

    name: str
    op: str
    source: str
    readers: tuple[str, ...]
    weight: Tensor
    attrs: Mapping[str, Any] = field(default_factory=dict)


def with_weights(graph: Graph, weights: Mapping[str, Mapping[str, Tensor]]) -> Graph:
    """The graph with some layers' parameters replaced; other layers that shared them keep the
    old values.

    A layer without a bias may be given one.
    """
    tensors, nodes = dict(graph.tensors), []
    for node in graph.nodes:
        if own := weights.get(node.name):
            paths = {key: _path(node, key, graph.uses) for key in own}
            tensors |= {paths[key]: tensor for key, tensor in own.items()}
            # A bias given as None
            attrs = {key: value for key, value in node.attrs.items() if key not in own}
            node = dataclasses.replace(node, params={**node.params, **paths}, attrs=attrs)
        nodes.append(node)
    return graph.replaced(nodes=tuple(nodes), tensors=tensors) if weights else graph


def _path(node: Node, key: str, uses: Mapping[str, int]) -> str:
    """Where the layer's own parameter stands: at its place if nobody else uses that."""
    weight = node.params.get("weight", key)
    beside = (
        f"{weight.removesuffix('weight')}{key}"
        if weight.endswith("weight")
        else f"{weight}.{key}"
    )
    path = node.params.get(key, beside)
    is_own = uses[weight] <= 1 and uses[path] <= int(key in node.params)
    return path if is_own else f"{path}@{node.name}"


def inserted(graph: Graph, insertions: Iterable[Insertion]) -> Graph:
    """The graph with these layers, each right after the node it reads; their tensors stand
    under their names.
    """
    for insertion in insertions:
        graph = _inserted(graph, insertion)
    return graph


def _inserted(graph: Graph, insertion: Insertion) -> Graph:
    source = graph.by_name[insertion.source]
    made = dataclasses.replace(
        source,
        name=insertion.name,
        op=insertion.op,
        target=f"rescale.{insertion.op}",
        inputs={"input": Ref(source.name)},
        attrs=dict(insertion.attrs),
        params={"weight": insertion.name},
    )

    def through(name: str) -> Ref:
        return Ref(insertion.name if name == insertion.source else name)

    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in insertion.readers:
            node = dataclasses.replace(node, inputs=map_refs(node.inputs, through))
        nodes.append(node)
        if node.name == insertion.source:
            nodes.append(made)
    return graph.replaced(
        nodes=tuple(nodes), tensors={**graph.tensors, insertion.name: insertion.weight}
    )


def by_channel(node: Node, weight: Tensor) -> Tensor:
    """The weight of a linear or convolution layer as [groups, a group's outputs, its inputs,
    taps]; often a view.

    Experts are groups that share inputs and outputs.
    """
    groups = int(node.attrs.get("groups", 1))
    table = weight.reshape(
        groups, weight.shape[0] // groups, weight.shape[1], weight.shape[2:].numel()
    )
    return table.transpose(1, 2) if node.row.transposed else table


def channels_of(node: Node, weight: Tensor) -> tuple[int, int]:
    """How many output and input channels a linear or convolution layer has."""
    groups, outputs, inputs, _ = by_channel(node, weight).shape
    apart = 1 if node.row.experts else groups
    return apart * outputs, apart * inputs


def rescaled(
    node: Node, weight: Tensor, outputs: Tensor | None = None, inputs: Tensor | None = None
) -> Tensor:
    """The weight with each output and each input channel multiplied by a factor; computed in
    the factors' dtype.
    """
    table = by_channel(node, weight)
    for factor, shape in (
        (outputs, (-1, table.shape[1], 1, 1)),
        (inputs, (-1, 1, table.shape[2], 1)),
    ):
        if factor is not None:
            table = table * factor.to(weight.device).reshape(shape)
    table = table.transpose(1, 2) if node.row.transposed else table
    return table.reshape(weight.shape).to(weight.dtype)
