"""Changes to a traced graph: other weights, and layers inserted between a value and its
readers. Also the channels of a weight.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quantizer.graph.channels.axis_rules import Commutes, is_padded
from quantizer.graph.ir import Graph, Node, Ref

_RECURRENT_WEIGHT = "weight_ih_l0"
"""How the weights of a recurrent layer's input begin, in either direction."""


@dataclass(frozen=True)
class Insertion:
    """A layer that reads one node and is read by others in its place.

    Args:
        name: of the layer, and of its tensor.
        op: "input_scale" (x * weight along axis `attrs["axis"]`) or "rotation" (see
            `nn.rare_layers`).
        source: the node that it reads.
        readers: the nodes that read it.
        weight: its tensor.
        attrs: its constants.
    """

    name: str
    op: str
    source: str
    readers: tuple[str, ...]
    weight: Tensor
    attrs: Mapping[str, Any] = field(default_factory=dict)


def with_weights(graph: Graph, weights: Mapping[str, Mapping[str, Tensor]]) -> Graph:
    """Return the graph with some layers' parameters replaced.

    Other layers that shared them keep the old values. A layer without a bias may be given one.
    """
    if not weights:
        return graph
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        params = dict(node.params)
        attrs = dict(node.attrs)
        for key, tensor in weights.get(node.name, {}).items():
            params[key] = _path(node, key, graph.uses)
            tensors[params[key]] = tensor
            attrs.pop(key, None)  # a bias of None
        nodes.append(replace(node, params=params, attrs=attrs))
    return graph.replaced(nodes=tuple(nodes), tensors=tensors)


def _path(node: Node, key: str, uses: Mapping[str, int]) -> str:
    """Return a path for a parameter that only this layer uses.

    It is the present path if no other layer uses that one.
    """
    weight = node.params.get("weight", key)
    # For a layer that has no such parameter yet
    new_path = f"{weight}.{key}"
    if weight.endswith("weight"):
        new_path = weight.removesuffix("weight") + key
    path = node.params.get(key, new_path)
    is_own = uses[weight] <= 1 and uses[path] <= int(key in node.params)
    return path if is_own else f"{path}@{node.name}"


def with_insertions(graph: Graph, insertions: Iterable[Insertion]) -> Graph:
    """Return the graph with these layers, each right after the node it reads."""
    for insertion in insertions:
        graph = _inserted(graph, insertion)
    return graph


def _inserted(graph: Graph, insertion: Insertion) -> Graph:
    source = graph.by_name[insertion.source]
    layer = replace(
        source,
        name=insertion.name,
        op=insertion.op,
        target=f"rescale.{insertion.op}",
        inputs={"input": Ref(source.name)},
        attrs=dict(insertion.attrs),
        params={"weight": insertion.name},
    )

    def through(name: str) -> Ref:
        return Ref(insertion.name) if name == source.name else Ref(name)

    nodes: list[Node] = []
    for node in graph.nodes:
        changed = node.reading(through) if node.name in insertion.readers else node
        nodes.append(changed)
        if node is source:
            nodes.append(layer)
    tensors = {**graph.tensors, insertion.name: insertion.weight}
    return graph.replaced(nodes=tuple(nodes), tensors=tensors)


def by_channel(node: Node, weight: Tensor) -> Tensor:
    """Return the weight of a linear or convolution layer as [groups, a group's outputs, its
    inputs, taps]; often a view.

    Experts are groups that share inputs and outputs.
    """
    groups = int(node.attrs.get("groups", 1))
    rows, columns = weight.shape[:2]
    taps = weight.shape[2:].numel()
    table = weight.reshape(groups, rows // groups, columns, taps)
    return table.transpose(1, 2) if node.row.transposed else table


def channels_of(node: Node, weight: Tensor) -> tuple[int, int]:
    """Return how many output and input channels a linear or convolution layer has."""
    without_values = weight.to("meta")
    table = by_channel(node, without_values)
    groups, outputs, inputs, _ = table.shape
    if node.row.experts:
        return outputs, inputs
    return groups * outputs, groups * inputs


def reads_one_by_one(graph: Graph, node: Node) -> bool:
    """Return whether each output channel of a layer depends on one input channel of several."""
    if not node.is_multiplying:
        return False
    groups, _, inputs, _ = by_channel(node, graph.weight(node).to("meta")).shape
    return inputs == 1 and groups > 1


def is_recurrent_layer(node: Node) -> bool:
    """Return whether it is a recurrent layer that owns its weights."""
    return _RECURRENT_WEIGHT in node.params


def input_weights(node: Node) -> list[str]:
    """Return the parameters whose columns multiply the channels of a layer's input: for a
    recurrent layer those of its first layer in each direction.
    """
    if not is_recurrent_layer(node):
        return ["weight"]
    keys = []
    for key in node.params:
        if key.startswith(_RECURRENT_WEIGHT):
            keys.append(key)
    return keys


def rescale_weight(
    node: Node, weight: Tensor, outputs: Tensor | None = None, inputs: Tensor | None = None
) -> Tensor:
    """Return the weight with each output and each input channel multiplied by a factor.

    The products are computed in the factors' dtype, and rounded to the weight's.
    """
    table = by_channel(node, weight)
    if outputs is not None:
        factors = outputs.to(weight.device)
        table = table * factors.reshape(-1, table.shape[1], 1, 1)
    if inputs is not None:
        factors = inputs.to(weight.device)
        table = table * factors.reshape(-1, 1, table.shape[2], 1)
    if node.row.transposed:
        table = table.transpose(1, 2)
    return table.reshape(weight.shape).to(weight.dtype)


def passes_shifts(node: Node) -> bool:
    """Return whether a constant added to a channel adds the same to what the node makes.

    A mean does not if it includes padding.
    """
    if Commutes.SHIFTS not in node.row.commutes:
        return False
    if node.attrs.get("divisor_override") is not None:
        return False
    return node.row.kind == "passthrough" or not is_padded(node.attrs)


def maker(graph: Graph, name: str) -> str:
    """Return the node that made a moved value; of one of several results, the node that picks
    it out of them.
    """
    node = graph.by_name[name]
    while node.row.kind == "passthrough":
        source = graph.source(node)
        if source is None or (node.op == "getitem" and source.row.kind != "passthrough"):
            break
        node = source
    return node.name
