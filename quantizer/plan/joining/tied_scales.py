"""Which layers share a scale, or the factor of their scales, because engines fuse them: query,
key and value of an attention, and the two factors of a gated product.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from quantizer.config.model import QuantizationSpec
from quantizer.graph.channels.axis_rules import PRODUCT
from quantizer.graph.ir import Graph, Node, derived
from quantizer.observers import Observer
from quantizer.plan.model import TensorSpecs

_NO_LAYERS: frozenset[str] = frozenset()
_FUSED_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""The names by which engines find such layers."""

Layers = tuple[str, ...]
"""Layers that share something, in execution order."""
_Labels = dict[str, frozenset[str]]
"""For each node, the layers whose outputs its value depends on."""


@derived
def fused_layers(graph: Graph) -> tuple[Layers, ...]:
    """Return the groups of layers that engines fuse, in execution order.

    Layers of a group are linear, read one value and stand in one module. In that module, their
    outputs meet in an attention or in a product. The graph of a module tree does not show that.
    There, the names by which engines find such layers count.
    """
    linears: list[Node] = []
    for node in graph.nodes:
        row = node.row
        is_linear = row.spatial == 0 and not row.experts
        if is_linear and node.is_multiplying:
            linears.append(node)
    if graph.is_of_modules:
        return _named_alike(graph, linears)
    readers: dict[tuple[str, ...], list[Node]] = {}
    for node in linears:
        operands = node.operands.values()
        key = (node.outer_scope, *operands)
        readers.setdefault(key, []).append(node)
    by_module: dict[str, list[list[Node]]] = {}
    for key, members in readers.items():
        scopes = {node.scope for node in members}
        if len(scopes) > 1:
            of_module = by_module.setdefault(key[0], [])
            of_module.append(members)
    groups: list[Layers] = []
    for module, candidates in by_module.items():
        groups += _meeting_groups(graph, module, candidates)
    groups.sort(key=lambda group: graph.index[group[0]])
    return tuple(groups)


def _named_alike(graph: Graph, linears: Sequence[Node]) -> tuple[Layers, ...]:
    """Return groups of layers by their names in one module, with equal numbers of inputs."""
    by_path: dict[str, Node] = {}
    for node in linears:
        by_path[node.scope] = node
    parents = dict.fromkeys(node.outer_scope for node in linears)
    groups: list[Layers] = []
    for parent, names in itertools.product(parents, _FUSED_NAMES):
        prefix = f"{parent}." if parent else ""
        layers: list[str] = []
        inputs: set[int] = set()
        for name in names:
            member = by_path.get(prefix + name)
            if member is not None:
                layers.append(member.name)
                inputs.add(graph.weight(member).shape[1])
        if len(layers) > 1 and len(inputs) == 1:
            groups.append(tuple(layers))
    return tuple(groups)


def _meeting_groups(
    graph: Graph, module: str, candidates: Iterable[Sequence[Node]]
) -> list[Layers]:
    """Return the parts of the candidates of one module whose outputs meet in it."""
    group_of: dict[str, set[str]] = {}
    value_read: dict[str, int] = {}
    for number, members in enumerate(candidates):
        for node in members:
            group_of[node.name] = {node.name}
            value_read[node.name] = number
    labels: _Labels = {}
    for node in _nodes_within(graph, module):
        arguments: list[frozenset[str]] = []
        for name in node.refs():
            arguments.append(labels.get(name, _NO_LAYERS))
        if _multiplies_values(node):
            _unite(arguments, value_read, group_of)
        value = _NO_LAYERS.union(*arguments)
        if node.name in group_of:
            value |= {node.name}
        if value:
            labels[node.name] = value
    united: dict[int, set[str]] = {}
    for layers in group_of.values():
        united[id(layers)] = layers
    groups: list[Layers] = []
    for layers in united.values():
        in_order = sorted(layers, key=graph.index.__getitem__)
        if len(layers) > 1:
            groups.append(tuple(in_order))
    return groups


def _nodes_within(graph: Graph, module: str) -> Iterator[Node]:
    """Yield the nodes of a module and of those inside it."""
    prefix = f"{module}." if module else ""
    for node in graph.nodes:
        is_inside = node.scope.startswith(prefix)
        if is_inside or node.scope == module:
            yield node


def _multiplies_values(node: Node) -> bool:
    """Return whether a node multiplies two values, elementwise or as matrices."""
    row = node.row
    is_matrix_product = row.kind == "mac" and not row.weight
    return is_matrix_product or row.axes is PRODUCT


def _unite(
    arguments: Sequence[frozenset[str]],
    value_read: Mapping[str, int],
    group_of: dict[str, set[str]],
) -> None:
    """Make one group of layers that read one value and reach different arguments.

    Args:
        arguments: for each argument of a product the layers that it depends on.
        value_read: for each layer the number of the value that it reads.
        group_of: the groups, which change.
    """
    for first, second in itertools.combinations(arguments, 2):
        only_first = sorted(first - second)
        only_second = sorted(second - first)
        for layer, other in itertools.product(only_first, only_second):
            if value_read[layer] != value_read[other]:
                continue
            united = group_of[layer] | group_of[other]
            for member in united:
                group_of[member] = united


def tied_layers(graph: Graph, specs: TensorSpecs) -> tuple[Layers, ...]:
    """Return the groups of layers whose weights share a scale or a factor.

    These are fused layers with one spec, of a float format that has one number for the whole
    tensor. An engine takes the largest number of a group for all of its layers.
    """
    groups: list[Layers] = []
    for group in fused_layers(graph):
        by_spec: dict[QuantizationSpec, list[str]] = {}
        for layer in group:
            key = (layer, "weights")
            spec = specs.get(key)
            if spec is None:
                continue
            if has_tensor_scale(spec):
                members = by_spec.setdefault(spec, [])
                members.append(layer)
        for layers in by_spec.values():
            if len(layers) > 1:
                groups.append(tuple(layers))
    return tuple(groups)


def has_tensor_scale(spec: QuantizationSpec) -> bool:
    """Return whether a float format has one scale, or one factor of its scales, for a tensor.

    Integers of one scale are stored with a scale for each row, so engines need not share it.

    >>> has_tensor_scale(QuantizationSpec(dtype="fp8_e4m3"))
    True
    """
    if not spec.is_scaled or spec.dtype == "int":
        return False
    return spec.scale_type == "e4m3" or spec.qscheme == "per_tensor"


def tied_steps(
    groups: Iterable[Layers], observer_of: Callable[[str], Observer]
) -> dict[str, float]:
    """Return the largest step of the weights that share a scale with a layer's, by layer.

    Args:
        groups: the layers whose weights share a scale.
        observer_of: returns the observer that has seen the weight of a layer.
    """
    steps: dict[str, float] = {}
    for group in groups:
        largest = 0.0
        for layer in group:
            observer = observer_of(layer)
            largest = max(largest, observer.largest_step())
        for layer in group:
            steps[layer] = largest
    return steps
