"""Config x graph -> plan. Decides for every tensor whether and how it is quantized; computes nothing on tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import Config, ConfigRule, QuantizationSpec, Role, Sourced
from quantizer.config.roles import base_role, is_parameter, parameter_role
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.granularity import scale_shape
from quantizer.plan import axes, checks, inheritance
from quantizer.plan.axes import Misfit, TensorView
from quantizer.plan.dpu_scales import with_finest_position
from quantizer.plan.floating import OUTSIDE, outside_stubs
from quantizer.plan.groups import Group, Layout, layout, quantization_point
from quantizer.plan.match import RANKS, Match, match
from quantizer.plan.model import Key, Plan, RuleMatch, TensorPlan

NO_RULES = "operator without quantization rules"
EXCLUDED = "excluded"
LEFT_FLOAT = "the config leaves it float"
ENTRIES = ("input", "quant_stub")
"""Operators whose output is what a config calls the network's input."""
_FIELDS = tuple(f.name for f in dataclasses.fields(QuantizationSpec))
_NO_VALUES = {"constant": "a constant", "module": "a module without weights that can be quantized"}
_DERIVED = ("ch_axis", "finest_position")  # by default from the layer and from the device


@dataclass
class _Resolver:
    """Everything one resolution needs; lives for one call of `resolve`."""

    config: Config
    graph: Graph
    original: Graph
    matches: list[Match] = field(default_factory=list)
    tensors: dict[Key, TensorPlan] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    off: dict[Key, str] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
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
    _plan_joined(state, where, kept)
    for name, point in where.served.items():
        if point in where.groups and point in state.floats:
            state.floats[name] = state.floats[point]
    state.findings += checks.ineffective(config, state.matches, state.effects, state.floats)
    state.findings += checks.overridden(config, state.matches)
    state.findings += checks.embeddings(config, state.matches, graph, state.tensors)
    state.findings += axes.misfits(state.misfits)
    rules = tuple(
        RuleMatch(r.label, r.selector.text or r.selector.kind, m.layers, count, str(r.selector.place or ""))
        for r, m, count in zip(config.rules, state.matches, state.effects, strict=True)
    )
    return Plan(graph, state.tensors, rules, state.floats, tuple(state.findings), config.settings, state.off)


def _plan_parameters(state: _Resolver, node: Node, where: Layout, kept: Mapping[str, str]) -> None:
    """Weights and biases of the layers that have them."""
    if not node.row.weight or node.name in kept:
        return
    if node.op == "parameter" and not _is_quantizable(state.graph, node, where):
        return
    for key in sorted(node.params, key=lambda name: name.startswith("bias")):
        role = parameter_role(key)
        view = axes.parameter_view(state.graph, node, role)
        _add(state, node.name, role, Group(node.name, (node.name,)), view)


def _is_quantizable(graph: Graph, node: Node, where: Layout) -> bool:
    """Whether a parameter that expressions read is quantized: no single number, nor what only float operators read."""
    return node.is_float and node.name not in where.floats and graph.weight(node).numel() > 1


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
    if reason is None and _holds_weights(state, node):
        reason = "keeps the quantization of its weights"
    role: Role = "input" if node.op in ENTRIES else "activation"
    if reason is not None or not _add(state, node.name, role, group, axes.output_view(state.graph, group)):
        state.floats[node.name] = reason or (EXCLUDED if _is_excluded(state, group.members) else LEFT_FLOAT)


def _plan_joined(state: _Resolver, where: Layout, kept: Mapping[str, str]) -> None:
    """What a concatenation in float leaves to its sources, where the config speaks of layers with weights only."""
    if state.config.form != "hierarchical":
        return
    for point, group in where.joined.items():
        joint = quantization_point(state.graph, where, point)
        if (joint, "activation") in state.tensors or kept.keys() & {*group.members}:
            continue
        if _add(state, point, "activation", group, axes.output_view(state.graph, group)):
            state.floats.pop(point, None)
            where.served.pop(point)


def _holds_weights(state: _Resolver, node: Node) -> bool:
    """Whether the output is rows of weights that are quantized alike for all rows: rounding again changes nothing."""
    weights = state.tensors.get((node.name, "weights")) if node.row.looks_up else None
    if weights is None or weights.spec.ch_axis is not None:
        return False
    merged = _merge(state, _rules_for(state, (node.name,), "activation"), "activation")
    if merged is None:
        return False
    spec, _ = merged
    return weights.spec.dtype == spec.dtype and weights.spec.bit_width <= spec.bit_width and not spec.is_dynamic


def _why_float(state: _Resolver, node: Node, where: Layout) -> str:
    """In words, for `inspect` and plan.json."""
    served = where.served.get(node.name)
    if served:
        return f"quantized at {served}"
    if served == "":
        return "the network's last activation"
    if node.op in _NO_VALUES:
        return _NO_VALUES[node.op]
    if node.name in where.floats and node.is_float:
        return where.floats[node.name]
    if node.row.kind == "float":
        return "computed in float"
    if node.dtype is not None and not node.is_float:
        return "not a floating-point tensor"
    if node.row.kind == "unknown" and any(state.graph.by_name[name].is_float for name in node.refs()):
        return NO_RULES
    if node.row.keeps_scale:
        return "keeps the quantization of its input"
    return "not an activation" if node.row.kind == "structural" else "not a floating-point tensor"


def _plan_inputs(state: _Resolver, node: Node, where: Layout, kept: Mapping[str, str]) -> None:
    """The layer's own quantization of what it reads, where a rule for that layer sets another than its producer has."""
    if (
        node.row.kind not in ("mac", "compute")
        or node.name in kept
        or not _rules_for(state, (node.name,), "input", minimum=1)
    ):
        return
    rules = _rules_for(state, (node.name,), "input")
    for role, name in node.input_roles().items():
        if not state.graph.by_name[name].is_float:
            continue
        view = axes.input_view(state.graph, node, name)
        merged = _merge(state, rules, "input")
        if merged and _is_quantized(state, where, name, axes.fitted(merged[0], view, role)):
            _count(state, rules, "input")
            continue
        _add(state, node.name, role, Group(name, (node.name,)), view)


def _is_quantized(state: _Resolver, where: Layout, name: str, spec: QuantizationSpec) -> bool:
    """Whether a node's values come from a quantizer with this spec already; moved values keep but one scale for all."""
    point = quantization_point(state.graph, where, name) or name
    made = "input" if state.graph.by_name[point].op in ENTRIES else "activation"
    producer = state.tensors.get((point, made))
    same = producer is not None and producer.spec == spec
    return same and (point == name or (spec.qscheme == "per_tensor" and not spec.is_dynamic))


def _add(state: _Resolver, layer: str, role: str, group: Group, view: TensorView) -> bool:
    """Resolve and record one tensor; False when the config leaves it float."""
    base = base_role(role)
    rules = _rules_for(state, group.members, base)
    merged = _merge(state, rules, base)
    if merged is None:
        _count_silenced(state, rules, base)
        return False
    spec, sources = axes.fitted(merged[0], view, role), merged[1]
    stated = {name: sources[name].origin for name in _FIELDS if name in sources}
    origins = {name: stated.get(name, "default") for name in _FIELDS if name in stated or name not in _DERIVED}
    weakest_first = [rule for _, rule in rules]
    found = [
        *checks.conflicting(layer, base, spec, sources, state.config, weakest_first),
        *checks.under_float(base, spec, weakest_first),
    ]
    if not _is_refused(found):
        found += axes.impossible(layer, role, spec, view, sources)
    state.findings += [f for f in found if not any(f.code == g.code and f.place == g.place for g in state.findings)]
    misfit = axes.misfit(layer, role, spec, view, sources)
    state.misfits += [misfit] if misfit else []
    _count(state, rules, base)
    if spec.dtype == "float32":
        state.off[(layer, role)] = origins["dtype"]
        return False
    scales = _scales(spec, view) if is_parameter(role) and not _is_refused(found) else 0
    state.tensors[(layer, role)] = TensorPlan(layer, role, spec, origins, group.point, group.members, scales)
    return True


def _is_refused(found: Iterable[Diagnostic]) -> bool:
    """Whether a tensor cannot be as the config says."""
    return any(finding.severity == "error" for finding in found)


def _scales(spec: QuantizationSpec, view: TensorView) -> int:
    """How many scales a parameter has."""
    sizes = tuple(size or 0 for size in view.sizes or ())
    return math.prod(scale_shape(sizes, spec.qscheme, spec.ch_axis, spec.group_size)) if spec.is_scaled else 0


def _rules_for(state: _Resolver, members: Iterable[str], role: Role, minimum: int = 0) -> list[tuple[int, ConfigRule]]:
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
    state: _Resolver, rules: list[tuple[int, ConfigRule]], role: Role
) -> tuple[QuantizationSpec, dict[str, Sourced]] | None:
    """The effective spec, each field from the strongest rule that sets it; None when the strongest word is "float"."""
    quantized = True
    for _, rule in rules:
        quantized = inheritance.says(rule, role, quantized)
    if not quantized:
        return None
    values = inheritance.merged([rule.fields.get(role, {}) for _, rule in rules], role)
    spec = QuantizationSpec.of(values)
    return with_finest_position(spec, state.config.settings.target_device), values


def _count_silenced(state: _Resolver, rules: list[tuple[int, ConfigRule]], role: Role) -> None:
    """Note for each rule for some layers that it leaves this tensor float, which weaker ones do not."""
    quantized = True
    for index, rule in rules:
        before, quantized = quantized, inheritance.says(rule, role, quantized)
        state.effects[index] += bool(state.matches[index].rank) and before and not quantized


def _is_excluded(state: _Resolver, members: Iterable[str]) -> bool:
    """Whether an entry of `exclude` names one of the layers."""
    return any(RANKS[state.matches[index].rank] == "exclude" for index, _ in _rules_for(state, members, "weights"))


def _count(state: _Resolver, rules: list[tuple[int, ConfigRule]], role: Role) -> None:
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
