"""Where activations are quantized: what shares one quantization and what needs none. Knows operators, no config."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.graph.ir import Graph, Node


@dataclass(frozen=True)
class Group:
    """Layers whose values are quantized once, at `point`; all of `members` may say how."""

    point: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """`groups` by the layer where each is quantized; `served` says which group another layer's output belongs to, or
    why none.
    """

    groups: dict[str, Group]
    served: dict[str, str]


def layout(graph: Graph) -> Layout:
    """Group the graph's floating-point values.

    A convolution followed only by a ReLU is quantized after the ReLU; the inputs of a concatenation only at its output;
    reshapes,
    pooling maxima and other moves keep the grid of their input (the rules of pytorch_nndct 3.5, whose last activation
    stays float too).
    """
    groups: dict[str, Group] = {}
    served: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in served or not node.is_float or not _makes_values(graph, node, groups, served):
            continue
        group, joins = _chain(graph, node)
        for member in group.members:
            if member != group.point:
                served[member] = group.point
        if joins:
            served[group.point] = joins
        elif _is_last_activation(graph, node):
            served[node.name] = ""
        else:
            groups[group.point] = group
    return Layout(groups, served)


def source_of(graph: Graph, name: str) -> str:
    """The node whose values a node hands on: through reshapes and other moves back to what computed them."""
    node = graph.by_name[name]
    while node.row.kind == "passthrough":
        node = graph.by_name[next(node.refs())]
    return node.name


def _makes_values(graph: Graph, node: Node, groups: dict[str, Group], served: dict[str, str]) -> bool:
    """Whether the node's output leaves the grid of its inputs, so that it needs a quantization of its own."""
    kind = node.row.kind
    if node.op == "input":
        return True
    if node.op == "relu" or (node.op == "pad" and not _pads_zeros(node)):
        source = source_of(graph, next(node.refs()))
        return node.op == "pad" or not (source in groups or source in served)
    if kind in ("unknown", "passthrough"):
        return kind == "unknown" and _feeds_mac(graph, node)
    return kind != "structural"


def _chain(graph: Graph, node: Node) -> tuple[Group, str]:
    """The group that starts at `node`, and the concatenation that quantizes it if it only feeds one."""
    members, point, current = [node.name], node.name, node
    pending: list[str] = []
    while True:
        readers = graph.consumers[current.name]
        if len(readers) != 1 or readers[0] == "":
            break
        reader = graph.by_name[readers[0]]
        if reader.row.kind == "fusable" and node.op != "input" and reader.is_float:
            members += [*pending, reader.name]
            pending, point, current = [], reader.name, reader
        elif reader.row.kind == "passthrough" and reader.is_float:
            pending.append(reader.name)
            current = reader
        elif reader.row.kind == "concat" and reader.is_float:
            return Group(point, tuple(members)), reader.name
        else:
            break
    return Group(point, tuple(members)), ""


def _feeds_mac(graph: Graph, node: Node) -> bool:
    """Whether a layer that multiplies and accumulates reads the node's values, directly or through moves."""
    todo = list(graph.consumers[node.name])
    while todo:
        name = todo.pop()
        if not name:
            continue
        reader = graph.by_name[name]
        if reader.row.kind == "mac":
            return True
        if reader.row.kind == "passthrough":
            todo += graph.consumers[name]
    return False


def _is_last_activation(graph: Graph, node: Node) -> bool:
    """A sigmoid or softmax whose result is only what the network returns."""
    return node.row.kind == "nonlinear" and set(graph.consumers[node.name]) == {""}


def _pads_zeros(node: Node) -> bool:
    """Padding with zeros, or with the tensor's own values, stays on the grid."""
    return node.attrs.get("mode", "constant") != "constant" or not node.attrs.get("value")
