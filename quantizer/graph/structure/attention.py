"""Find the keys and values of attentions, which engines keep in a cache, and the layers that
compute them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quantizer.graph.channels.axis_rules import ATTENTION
from quantizer.graph.ir import Graph, Node, Ref, derived, readers, walk_back

_SOFTMAX = "softmax"
_SCORE_KINDS = frozenset({"passthrough", "compute", "fusable", "nonlinear", "float", "join"})
"""The kinds of operators between the product of queries and keys and the softmax."""
_NO_LAYERS: frozenset[str] = frozenset()
_FEATURES = -1
_FEATURES_OF_TRANSPOSED = -2

Part = Literal["key", "value"]


@dataclass(frozen=True)
class CachedValue:
    """The keys or the values of an attention, as it multiplies them.

    Attributes:
        part: which of the two it is.
        layer: the operator that multiplies them.
        role: of its input.
        value: the node that it reads.
        features: the axis of a head's features.
        is_fused: whether the operator is the whole attention, and transposes keys itself.
        sources: the layers with weights that compute them.
    """

    part: Part
    layer: str
    role: str
    value: str
    features: int
    is_fused: bool
    sources: frozenset[str]


@dataclass(frozen=True)
class _Operand:
    """An argument of a product that is the keys or the values of an attention."""

    part: Part
    layer: Node
    argument: str
    features: int


@derived
def cached_values(graph: Graph) -> tuple[CachedValue, ...]:
    """Return the keys and values of all attentions, in execution order.

    An attention is one operator, or two products of values with a softmax between them. Keys
    are read after the rotary embedding.
    """
    sources = _sources(graph)
    values: list[CachedValue] = []
    for node in graph.nodes:
        for operand in _operands_of(graph, node):
            role = _role_of(operand.layer, operand.argument)
            value = operand.layer.inputs.get(operand.argument)
            if role is None or not isinstance(value, Ref):
                continue
            cached = CachedValue(
                part=operand.part,
                layer=operand.layer.name,
                role=role,
                value=value.name,
                features=operand.features,
                is_fused=node.row.axes is ATTENTION,
                sources=sources.get(value.name, _NO_LAYERS),
            )
            values.append(cached)
    return tuple(values)


def _operands_of(graph: Graph, node: Node) -> list[_Operand]:
    """Return the keys and the values of an attention, if the node is one, or its softmax."""
    if node.row.axes is ATTENTION:
        return [
            _Operand("key", node, "key", _FEATURES),
            _Operand("value", node, "value", _FEATURES),
        ]
    if node.op == _SOFTMAX:
        return _operands_around(graph, node)
    return []


def _role_of(node: Node, argument: str) -> str | None:
    """Return the role of an argument of a node; None if it has none."""
    for index, name in enumerate(node.inputs):
        if name == argument:
            return f"input_{index}" if index else "input"
    return None


def _operands_around(graph: Graph, softmax: Node) -> list[_Operand]:
    """Return the keys and the values around a softmax, if it is that of an attention."""
    scores = list(_products_before(graph, softmax))
    weighted = list(_products_after(graph, softmax))
    if len(scores) != 1 or len(weighted) != 1:
        return []
    [(product, argument)] = scores
    keys = _Operand("key", product, argument, _FEATURES_OF_TRANSPOSED)
    [(product, argument)] = weighted
    return [keys, _Operand("value", product, argument, _FEATURES)]


def _products_before(graph: Graph, softmax: Node) -> Iterator[tuple[Node, str]]:
    """Yield the products of two values that the argument of a softmax is computed from, each
    with the argument of its second factor.
    """

    def operands(node: Node) -> Iterable[str]:
        is_between = node.row.kind in _SCORE_KINDS and not node.params
        return node.refs() if is_between else ()

    for node in walk_back(graph, softmax.refs(), operands):
        factors = _factors(node)
        if factors and not _has_weight(graph, node):
            yield node, factors[1]


def _products_after(graph: Graph, softmax: Node) -> Iterator[tuple[Node, str]]:
    """Yield the products that read what a softmax returns, each with the argument of its other
    factor.
    """
    for reader, name in readers(graph, softmax.name):
        node = graph.by_name.get(reader)
        factors = None if node is None else _factors(node)
        if node is not None and factors and node.inputs[factors[0]] == Ref(name):
            yield node, factors[1]


def _factors(node: Node) -> tuple[str, str] | None:
    """Return the arguments of the two factors of a matrix product; None for other operators."""
    for factors in (("input", "other"), ("input", "mat2"), ("batch1", "batch2")):
        is_product = node.row.kind == "mac" and not node.row.weight
        if is_product and all(isinstance(node.inputs.get(name), Ref) for name in factors):
            return factors
    return None


def _has_weight(graph: Graph, node: Node) -> bool:
    """Return whether a node multiplies by a weight: its own, or a trained tensor."""
    if node.row.kind != "mac":
        return False
    reads_parameter = any(graph.by_name[name].op == "parameter" for name in node.refs())
    return node.row.weight or reads_parameter


def _sources(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Return for each node the layers that its value comes from with no other product between.

    Norms change the outputs of such layers, and do not count.
    """
    sources: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        if _has_weight(graph, node) and not node.row.scales_channels:
            sources[node.name] = frozenset({node.name})
            continue
        if node.row.kind == "mac":
            continue
        read = [sources.get(name, _NO_LAYERS) for name in node.refs()]
        value = _NO_LAYERS.union(*read)
        if value:
            sources[node.name] = value
    return sources
