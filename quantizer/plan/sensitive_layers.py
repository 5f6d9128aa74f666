"""Find the layers that lose most in few bits: layers of outputs, routers, and readers of a
normalization. It follows from the graph alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quantizer.graph.ir import Graph, Node, references
from quantizer.plan.floating import derived_layers

_AFFINE = ("mul", "add")
_CUTS = ("slice", "split", "chunk", "unbind", "select")


@dataclass(frozen=True)
class SensitiveLayers:
    """Layers with weights, in execution order.

    Attributes:
        heads: they make the outputs, and nothing else in the network multiplies what they make.
        divided: those of `heads` whose outputs are cut into parts, or joined with those of
            other heads.
        routers: the largest of their values choose what is computed or returned.
    """

    heads: tuple[str, ...]
    divided: tuple[str, ...]
    routers: tuple[str, ...]


def sensitive_layers(graph: Graph) -> SensitiveLayers:
    """Return the heads and routers of a network."""
    makers = _makers(graph)
    read_inside: set[str] = set()
    routers: set[str] = set()
    cut: set[str] = set()
    for node in graph.nodes:
        layers = _union(makers, node.refs())
        if node.row.orders:
            routers |= layers
        is_opaque = _may_hold_floats(node) and not makers[node.name]
        if is_opaque or node.is_multiplying:
            read_inside |= layers
        if node.op in _CUTS:
            cut |= layers
    heads = _union(makers, references(graph.output)) - read_inside
    divided = heads & cut
    if len(heads) > 1:
        divided = heads
    return SensitiveLayers(
        _in_execution_order(graph, heads),
        _in_execution_order(graph, divided),
        _in_execution_order(graph, routers),
    )


def behind_norms(graph: Graph) -> list[str]:
    """Return the linear layers that read the output of a normalization over channels, as those
    of transformers do.

    A normalization may be one operator, or written by hand with `rsqrt`.
    """
    fixed: set[str] = set()
    normalized: set[str] = set()
    layers = []
    for node in graph.nodes:
        operands = _values_read(graph, node)
        varying = operands - fixed
        if node.is_tensor or (operands and not varying):
            fixed.add(node.name)
        elif _normalizes(graph, node):
            normalized.add(node.name)
        elif len(varying) != 1 or varying.isdisjoint(normalized):
            continue
        elif node.row.spatial == 0:
            layers.append(node.name)
        elif node.row.kind == "passthrough" or node.op in _AFFINE:
            normalized.add(node.name)
    return layers


def _values_read(graph: Graph, node: Node) -> set[str]:
    """Return the nodes whose floating-point values a node reads, not only their shape."""
    inputs = dict(node.inputs)
    if node.row.shape_of:
        inputs.pop(node.row.shape_of, None)
    names: set[str] = set()
    for name in references(inputs):
        if _may_hold_floats(graph.by_name[name]):
            names.add(name)
    return names


def _may_hold_floats(node: Node) -> bool:
    """Return whether the node makes a floating-point tensor, or several results."""
    has_results = node.dtype is None and node.row.kind != "structural"
    return node.is_float or has_results


def _normalizes(graph: Graph, node: Node) -> bool:
    if node.row.normalizes:
        return True
    if node.op != "mul":
        return False
    return any(graph.by_name[name].op == "rsqrt" for name in node.refs())


def _makers(graph: Graph) -> dict[str, frozenset[str]]:
    """Return for each node the layers with weights that make its value without others.

    A join has those of its parts. A value that is computed from those of several layers, such
    as the sum of a residual connection, has none, and neither has that of a normalization.
    """
    makers: dict[str, frozenset[str]] = {}
    constants = derived_layers(graph)
    for node in graph.nodes:
        if node.is_multiplying:
            makers[node.name] = frozenset({node.name})
            continue
        makers[node.name] = frozenset()
        if node.row.kind in ("mac", "structural") or node.row.normalizes:
            continue
        operands = set()
        for name in _values_read(graph, node):
            if name not in constants and graph.by_name[name].op != "parameter":
                operands.add(makers[name])
        if node.is_join:
            makers[node.name] = frozenset().union(*operands)
        elif len(operands) == 1:
            makers[node.name] = operands.pop()
    return makers


def _union(makers: dict[str, frozenset[str]], names: Iterable[str]) -> set[str]:
    layers: set[str] = set()
    for name in names:
        layers |= makers[name]
    return layers


def _in_execution_order(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=graph.index.__getitem__))
