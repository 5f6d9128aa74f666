"""Config x graph -> plan. Decides for every tensor whether and how it is quantized; computes nothing on tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import Config, QuantizationSpec, Role, Rule, Sourced
from quantizer.config.roles import base_role, parameter_role
from quantizer.graph.ir import Graph, Node
from quantizer.plan import checks
from quantizer.plan.floating import OUTSIDE, outside_stubs
from quantizer.plan.groups import Group, Layout, grid_of, layout
from quantizer.plan.match import Match, match
from quantizer.plan.model import Plan, RuleMatch, TensorPlan

NO_RULES = "operator without quantization rules"
_FIELDS = tuple(f.name for f in dataclasses.fields(QuantizationSpec))


@dataclass
class _Resolver:
    """Everything one resolution needs; lives for one call of `resolve`."""

    config: Config
    graph: Graph
    original: Graph
    matches: list[Match] = field(default_factory=list)
    tensors: dict[tuple[str, str], TensorPlan] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    effects: list[int] = field(default_factory=list)


def resolve(config: Config, graph: Graph, original: Graph) -> Plan:
    """The plan of `config` for `graph`; `original` is the graph before passes, whose names users may write too.

    The plan's `diagnostics` hold errors as well: selectors that match nothing and conflicts that only show after
    merging.
    """
    state = _Resolver(config, graph, original)
    state.matches = [match(rule.selector, graph, original) for rule in config.rules]
    state.effects = [0] * len(config.rules)
    state.findings += checks.unmatched(config, state.matches, original)
    where = layout(graph)
    kept = _kept_float(config, graph)
    for node in graph.nodes:
        _plan_parameters(state, node, where, kept)
        _plan_activation(state, node, where, kept)
        _plan_inputs(state, node, where, kept)
    for name, point in where.served.items():
        if point in where.groups and point in state.floats:
            state.floats[name] = state.floats[point]
    state.findings += checks.ineffective(config, state.matches, state.effects, state.floats)
    state.findings += checks.overridden(config, state.matches)
    rules = tuple(
        RuleMatch(r.label, r.selector.text or r.selector.kind, m.layers, count, str(r.selector.place or ""))
        for r, m, count in zip(config.rules, state.matches, state.effects, strict=True)
    )
    return Plan(graph, state.tensors, rules, state.floats, tuple(state.findings), config.settings)


def _plan_parameters(state: _Resolver, node: Node, where: Layout, kept: Mapping[str, str]) -> None:
    """Weights and biases of the layers that have them."""
    if not node.row.weight or node.name in kept:
        return
    if node.op == "parameter" and not _is_quantizable(state.graph, node, where):
        return
    for key in sorted(node.params, key=lambda name: name.startswith("bias")):
        role = parameter_role(key)
        axis = _channel_axis(node) if base_role(role) == "weights" else None
        shape = state.graph.tensors[node.params[key]].shape
        _add(state, node.name, role, Group(node.name, (node.name,)), axis, shape[axis] if axis is not None else None)


def _is_quantizable(graph: Graph, node: Node, where: Layout) -> bool:
    """Whether a parameter that expressions read has a grid: not a single number, nor what only float operators read."""
    return node.is_float and node.name not in where.floats and graph.tensors[node.params["weight"]].numel() > 1


def _channel_axis(node: Node) -> int | None:
    """Where a weight's output channels are; what an expression reads has none that we know of."""
    if node.op == "parameter":
        return None
    return 1 if "transpose" in node.op else 0


def _plan_activation(state: _Resolver, node: Node, where: Layout, kept: Mapping[str, str]) -> None:
    """The layer's output, where its group is quantized."""
    group = where.groups.get(node.name)
    if kept.get(node.name) == OUTSIDE:
        state.floats[node.name] = OUTSIDE
        return
    if group is None:
        state.floats[node.name] = _why_float(state, node, where)
        return
    reason = next((kept[member] for member in group.members if member in kept), None)
    if reason is None and node.op == "input" and _feeds_only(state.graph, node, kept):
        reason = "keep_first_last_layer_accuracy"
    if reason is None and _keeps_weights_grid(state, node):
        reason = "keeps the grid of its weights"
    role: Role = "input" if node.op in ("input", "quant_stub") else "activation"
    if reason is not None or not _add(state, node.name, role, group):
        state.floats[node.name] = reason or "the config leaves it float"


def _keeps_weights_grid(state: _Resolver, node: Node) -> bool:
    """Whether the output is rows of weights that are quantized alike for all rows: rounding again changes nothing."""
    weights = state.tensors.get((node.name, "weights")) if node.op == "embedding" else None
    if weights is None or weights.spec.ch_axis is not None:
        return False
    merged = _merge(state, _rules_for(state, (node.name,), "activation"), "activation")
    if merged is None:
        return False
    return weights.spec.dtype == merged[0].dtype and weights.spec.bit_width <= merged[0].bit_width


def _why_float(state: _Resolver, node: Node, where: Layout) -> str:
    """In words, for `inspect` and plan.json."""
    served = where.served.get(node.name)
    if served:
        return f"quantized at {served}"
    if served == "":
        return "the network's last activation"
    if node.op == "constant":
        return "a constant"
    if node.name in where.floats and node.is_float:
        return where.floats[node.name]
    if node.row.kind == "float":
        return "computed in float"
    if node.dtype is not None and not node.is_float:
        return "not a floating-point tensor"
    if node.row.kind == "unknown" and any(state.graph.by_name[name].is_float for name in node.refs()):
        return NO_RULES
    if node.row.kind == "passthrough" or node.op == "relu":
        return "keeps the grid of its input"
    return "not an activation" if node.row.kind == "structural" else "not a floating-point tensor"


def _plan_inputs(state: _Resolver, node: Node, where: Layout, kept: Mapping[str, str]) -> None:
    """A grid of its own for what a layer reads, when a rule for that layer sets another one than its producer has."""
    if (
        node.row.kind not in ("mac", "compute")
        or node.name in kept
        or not _rules_for(state, (node.name,), "input", minimum=1)
    ):
        return
    for role, name in node.input_roles().items():
        point = grid_of(state.graph, where, name) or name
        producer = state.tensors.get((point, "activation")) or state.tensors.get((point, "input"))
        spec = _merge(state, _rules_for(state, (node.name,), "input"), "input")
        if spec is None or not state.graph.by_name[name].is_float:
            continue
        if producer is not None and producer.spec == spec[0]:
            _count(state, _rules_for(state, (node.name,), "input"), "input")
            continue
        _add(state, node.name, role, Group(name, (node.name,)))


def _add(
    state: _Resolver, layer: str, role: str, group: Group, axis: int | None = None, channels: int | None = None
) -> bool:
    """Resolve and record one tensor; False when the config leaves it float."""
    base = base_role(role)
    rules = _rules_for(state, group.members, base)
    merged = _merge(state, rules, base)
    if merged is None:
        return False
    spec, sources = merged
    if spec.qscheme == "per_channel":
        spec = dataclasses.replace(spec, ch_axis=axis, qscheme="per_tensor" if axis is None else spec.qscheme)
    origins = {name: sources[name].origin if name in sources else "default" for name in _FIELDS if name != "ch_axis"}
    found = [
        *checks.conflicting(layer, base, spec, sources, state.config.settings.target_device),
        *checks.under_float(base, spec, [rule for _, rule in rules]),
    ]
    state.findings += [f for f in found if not any(f.code == g.code and f.place == g.place for g in state.findings)]
    _count(state, rules, base)
    if spec.dtype == "float32":
        return False
    channels = channels if spec.ch_axis is not None else None
    state.tensors[(layer, role)] = TensorPlan(layer, role, spec, origins, group.point, group.members, channels)
    return True


def _rules_for(state: _Resolver, members: Iterable[str], role: Role, minimum: int = 0) -> list[tuple[int, Rule]]:
    """The rules that speak about any of the layers, weakest first; equal ranks in the file's order."""
    wanted = set(members)
    found = [
        (index, rule)
        for index, (rule, m) in enumerate(zip(state.config.rules, state.matches, strict=True))
        if m.rank >= minimum and wanted.intersection(m.layers)
    ]
    if minimum:
        found = [
            (index, rule)
            for index, rule in found
            if role in (rule.roles or ()) or role in rule.adds or rule.fields.get(role)
        ]
    return sorted(found, key=lambda item: state.matches[item[0]].rank)


def _merge(
    state: _Resolver, rules: list[tuple[int, Rule]], role: Role
) -> tuple[QuantizationSpec, dict[str, Sourced]] | None:
    """The effective spec, each field from the strongest rule that sets it; None when the strongest word is "float"."""
    values: dict[str, Sourced] = {}
    quantized = True
    for _, rule in rules:
        if rule.roles is not None:
            quantized = role in rule.roles
        quantized = quantized or role in rule.adds
        values |= rule.fields.get(role, {})
    if not quantized:
        for index, rule in rules:
            if rule.roles is not None and role not in rule.roles and state.matches[index].rank:
                state.effects[index] += 1
        return None
    return QuantizationSpec(**{name: sourced.value for name, sourced in values.items()}), values


def _count(state: _Resolver, rules: list[tuple[int, Rule]], role: Role) -> None:
    """Note for each rule that it set something for this tensor."""
    for index, rule in rules:
        state.effects[index] += bool(rule.fields.get(role))


def _kept_float(config: Config, graph: Graph) -> dict[str, str]:
    """Layers that a global switch keeps in float, with the switch's name."""
    kept = dict.fromkeys(outside_stubs(graph), OUTSIDE)
    weighted = [node.name for node in graph.nodes if node.row.weight and node.params and node.op != "parameter"]
    if config.settings.keep_first_last_layer_accuracy and weighted:
        kept |= dict.fromkeys((weighted[0], weighted[-1]), "keep_first_last_layer_accuracy")
    if config.settings.keep_add_layer_accuracy:
        kept |= {node.name: "keep_add_layer_accuracy" for node in graph.nodes if node.op == "add"}
    return kept


def _feeds_only(graph: Graph, node: Node, kept: Mapping[str, str]) -> bool:
    """Whether all readers of a network input are kept in float."""
    readers = graph.consumers[node.name]
    return bool(readers) and all(kept.get(name) == "keep_first_last_layer_accuracy" for name in readers)
