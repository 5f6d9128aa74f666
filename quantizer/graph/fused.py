"""Find the linear layers that engines fuse into one: query, key and value of an attention, and
the two factors of a gated product.
"""

from collections.abc import Iterable, Mapping, Sequence

from quantizer.graph.ir import (
    Graph,
    Node,
    references,
)

_MEETINGS = ("matmul", "mul", "scaled_dot_product_attention")
"""The operators in which outputs of fused layers meet."""
_ENTRY = "module_input"
"""The input of a layer in the graph of a module tree, which shows no values between layers."""
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
_DERIVED = "fused layers"

_Labels = dict[str, frozenset[str]]
"""For each node, the layers whose outputs its value depends on."""


def fused_layers(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the groups of layers that engines fuse, in execution order.

    Layers of a group are linear, read one value and stand in one module. In that module, their
    outputs meet in an attention or in a product. The graph of a module tree does not show that.
    There, the names by which engines find such layers count.
    """
    if _DERIVED not in graph.derived:
        graph.derived[_DERIVED] = _find_groups(graph)
    groups: tuple[tuple[str, ...], ...] = graph.derived[_DERIVED]
    return groups


def _find_groups(graph: Graph) -> tuple[tuple[str, ...], ...]:
    linears: list[Node] = []
    for node in graph.nodes:
        is_linear = node.is_multiplying and node.row.spatial == 0
        if is_linear and not node.row.experts:
            linears.append(node)
    if any(node.op == _ENTRY for node in graph.nodes):
        return _named_alike(graph, linears)
    candidates: dict[tuple[str, ...], list[Node]] = {}
    for node in linears:
        key = (_parent(node), *node.operands.values())
        candidates.setdefault(key, []).append(node)
    by_module: dict[str, list[list[Node]]] = {}
    for (module, *_), members in candidates.items():
        if len({node.scope for node in members}) > 1:
            by_module.setdefault(module, []).append(members)
    groups: list[tuple[str, ...]] = []
    for module, of_module in by_module.items():
        groups += _meeting_groups(graph, module, of_module)
    groups.sort(key=lambda group: graph.index[group[0]])
    return tuple(groups)


def _parent(node: Node) -> str:
    return node.scope.rpartition(".")[0]


def _named_alike(
    graph: Graph,
    linears: Sequence[Node],
) -> tuple[tuple[str, ...], ...]:
    """Return groups of layers by their names in one module, with equal numbers of inputs."""
    by_path = {node.scope: node for node in linears}
    groups: list[tuple[str, ...]] = []
    for parent in dict.fromkeys(map(_parent, linears)):
        prefix = f"{parent}." if parent else ""
        for names in _FUSED_NAMES:
            paths = [prefix + name for name in names]
            members = [by_path[path] for path in paths if path in by_path]
            inputs = {graph.weight(node).shape[1] for node in members}
            if len(members) > 1 and len(inputs) == 1:
                groups.append(tuple(node.name for node in members))
    return tuple(groups)


def _meeting_groups(
    graph: Graph,
    module: str,
    candidates: Iterable[Sequence[Node]],
) -> list[tuple[str, ...]]:
    """Return the parts of the candidates of one module whose outputs meet in it."""
    group_of: dict[str, set[str]] = {}
    for members in candidates:
        for node in members:
            group_of[node.name] = {node.name}
    inputs_of: dict[str, int] = {}
    for number, members in enumerate(candidates):
        for node in members:
            inputs_of[node.name] = number
    prefix = f"{module}." if module else ""
    labels: _Labels = {}
    for node in graph.nodes:
        if node.scope != module and not node.scope.startswith(prefix):
            continue
        arguments = _labels_of_arguments(labels, node)
        if node.op in _MEETINGS:
            _unite(arguments, inputs_of, group_of)
        value = frozenset().union(*arguments)
        if node.name in group_of:
            value |= {node.name}
        if value:
            labels[node.name] = value
    groups: list[tuple[str, ...]] = []
    for united in {id(group): group for group in group_of.values()}.values():
        if len(united) > 1:
            groups.append(tuple(sorted(united, key=graph.index.__getitem__)))
    return groups


def _labels_of_arguments(
    labels: Mapping[str, frozenset[str]], node: Node
) -> list[frozenset[str]]:
    """Return for each argument the layers that its value depends on."""
    arguments: list[frozenset[str]] = []
    for value in node.inputs.values():
        layers: set[str] = set()
        for name in references(value):
            layers |= labels.get(name, frozenset())
        arguments.append(frozenset(layers))
    return arguments


def _unite(
    arguments: Sequence[frozenset[str]],
    inputs_of: Mapping[str, int],
    group_of: dict[str, set[str]],
) -> None:
    """Unite the groups of layers that read one value and reach different arguments."""
    for number, first in enumerate(arguments):
        for second in arguments[number + 1 :]:
            for layer in sorted(first - second):
                for other in sorted(second - first):
                    if inputs_of[layer] == inputs_of[other]:
                        united = group_of[layer] | group_of[other]
                        group_of.update(dict.fromkeys(united, united))
