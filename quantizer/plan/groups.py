"""Where activations are quantized: what shares one quantization and what needs none. Knows operators, no config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quantizer.graph.axis_rules import PADDED, pads_zeros
from quantizer.graph.ir import Graph, Node, readers
from quantizer.plan.floating import MASK, computes_in_float, floating, multiplied
from quantizer.plan.sentinels import chooses


@dataclass(frozen=True)
class Group:
    """Layers whose values are quantized once, at `point`; all of `members` may say how."""

    point: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """`groups` by the layer where each is quantized; `served` names the layer that quantizes another's output; `floats`
    says why others need no quantization; `joined` are the groups that a concatenation serves.
    """

    groups: dict[str, Group]
    served: dict[str, str]
    floats: dict[str, str] = field(default_factory=dict)
    joined: dict[str, Group] = field(default_factory=dict)


def layout(graph: Graph) -> Layout:
    """Group the graph's floating-point values.

    A convolution followed only by a ReLU is quantized after the ReLU; the inputs of a concatenation only at its output;
    reshapes, pooling maxima and other moves keep the quantization of their input. The last activation
    stays float.

    Source: pytorch_nndct 3.5.
    """
    groups: dict[str, Group] = {}
    served: dict[str, str] = {}
    where = Layout(groups, served, floating(graph))
    for node in graph.nodes:
        if node.name in served or node.name in groups or not node.is_float or not _makes_values(graph, node, where):
            continue
        group, joins = _chain(graph, node)
        for member in group.members:
            if member != group.point:
                served[member] = group.point
        if joins:
            served[group.point] = joins
            where.joined[group.point] = group
        elif node.row.kind == "nonlinear" and {name for name, _ in readers(graph, node.name)} == {""}:
            served[node.name] = ""  # a sigmoid or softmax whose result is only what the network returns
        else:
            groups[group.point] = group
    return where


def quantization_point(graph: Graph, where: Layout, name: str) -> str | None:
    """The layer at which a node's values are quantized: its group's point, or that of the values it hands on."""
    node = graph.by_name[name]
    if name in where.groups:
        return name
    if where.served.get(name):
        return quantization_point(graph, where, where.served[name])
    if node.row.keeps_scale:
        return quantization_point(graph, where, next(node.refs()))
    return None


def _makes_values(graph: Graph, node: Node, where: Layout) -> bool:
    """Whether the node's output has other values than its inputs, so that it needs a quantization of its own."""
    producer = _producer(graph, node)
    kind = producer.row.kind
    if node.name in where.floats or kind in ("unknown", "float"):
        read = ((graph.by_name[n], value) for n, value in _readers(graph, node.name, where.floats) if n)
        return any(multiplied(n, value) and not computes_in_float(n, where.floats) for n, value in read)
    if chooses(producer) and any(where.floats.get(name) == MASK for name in producer.refs()):
        return True
    if node.op == "input":
        return True
    if node.row.axes is PADDED and not pads_zeros(node.attrs):
        return True
    if node.row.rectifies:
        return quantization_point(graph, where, node.name) is None
    return kind not in ("passthrough", "structural")


def _readers(graph: Graph, name: str, floats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The `readers` of a node's values; of values with sentinels, which do not outlive a choice, also what chooses."""
    for reader in graph.consumers[name]:
        is_moved = reader and graph.by_name[reader].row.kind == "passthrough"
        if is_moved and not (floats.get(name) == MASK and chooses(graph.by_name[reader])):
            yield from _readers(graph, reader, floats)
        else:
            yield reader, name


def _chain(graph: Graph, node: Node) -> tuple[Group, str]:
    """The group that starts at `node`, and the concatenation that quantizes it if it only feeds one."""
    members, point, current = [*dict.fromkeys((_producer(graph, node).name, node.name))], node.name, node
    pending: list[str] = []
    while True:
        readers = graph.consumers[current.name]
        if len(readers) != 1 or readers[0] == "":
            break
        reader = graph.by_name[readers[0]]
        if reader.row.kind == "fusable" and node.op not in ("input", "quant_stub") and reader.is_float:
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


def _producer(graph: Graph, node: Node) -> Node:
    """The operator that computes what the node picks out of several results (an LSTM's outputs), else the node."""
    return graph.by_name[next(node.refs())] if node.op == "getitem" else node
