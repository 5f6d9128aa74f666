"""Config x graph -> plan. Decides for every tensor whether and how it is quantized; computes
nothing on tensors.
"""

import dataclasses
import math
from collections.abc import Iterable

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.effective import effective
from quantizer.config.model import (
    AUTO,
    CAST_ONLY,
    POOLED,
    Config,
    QuantizationSpec,
    Role,
    Sourced,
)
from quantizer.config.roles import base_role, is_parameter, parameter_role
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.granularity import scale_shape
from quantizer.plan import axes, checks
from quantizer.plan.axes import Misfit, TensorView
from quantizer.plan.floating import ARGUMENT, OUTSIDE, RESIDUAL
from quantizer.plan.groups import Group, layout, quantization_point
from quantizer.plan.joins import (
    OWN,
    JoinPlanner,
    decided_unseen,
    input_role,
    observed_at,
    open_joins,
    products_of,
    single_joins,
    watched,
)
from quantizer.plan.kept_float import FIRST_LAST, kept_float, residual
from quantizer.plan.match import RANKS, MatchedRule, match
from quantizer.plan.merged_fields import merged, with_finest_position
from quantizer.plan.model import ENTRIES, Key, Plan, TensorPlan
from quantizer.plan.ungrouped import is_apart

NO_RULES = "operator without quantization rules"
EXCLUDED = "excluded"
LEFT_FLOAT = "the config leaves it float"
APART = "holds parts that nothing reads which needs one scale for them"
_FIELDS = tuple(f.name for f in dataclasses.fields(QuantizationSpec))
_NO_VALUES = {
    "constant": "a constant",
    "module": "a module without weights that can be quantized",
}
_DERIVED = ("ch_axis", "finest_position")  # by default from the layer and from the device


def resolve(config: Config, graph: Graph, original: Graph) -> Plan:
    """The plan of `config` for `graph`; `original` is the graph before passes, whose names
    users may write too.

    The plan's `diagnostics` hold errors as well: selectors that match nothing and conflicts
    that only show after merging.
    """
    return _Resolver(config, graph, original).plan()


class _Resolver:
    """Everything one resolution needs, and what it has decided so far."""

    def __init__(self, config: Config, graph: Graph, original: Graph) -> None:
        self.config, self.graph = config, graph
        self.rules = [
            MatchedRule(rule, match(rule.selector, graph, original)) for rule in config.rules
        ]
        self.where = layout(graph, single_joins(config, graph, self.rules))
        self.joins = open_joins(self.where)
        self.products = products_of(self.joins.values())
        self.watched = watched(self.joins.values())
        self.kept = kept_float(config, graph)
        self.residual = residual(config, graph, self.rules)
        self.tensors: dict[Key, TensorPlan] = {}
        self.floats: dict[str, str] = {}
        self.off: dict[Key, str] = {}
        self.stated: set[Key] = set()
        self.ungrouped: dict[Key, str] = {}
        self.findings: list[Diagnostic] = [*checks.unmatched(config.form, self.rules, original)]
        self.misfits: list[Misfit] = []

    def plan(self) -> Plan:
        """Decide layer by layer."""
        for node in self.graph.nodes:
            self._plan_parameters(node)
            self._plan_activation(node)
            self._plan_inputs(node)
            self._plan_joined_inputs(node)
        self._plan_argument_inputs()
        planner = JoinPlanner(self.where, self.graph, self.tensors, stated=self.stated)
        observed = planner.unplanned_parts()
        self.tensors |= observed
        joins = planner.plans(observed)
        for name, point in self.where.served.items():
            is_planned = (name, "activation") in self.tensors
            if point in self.where.groups and point in self.floats and not is_planned:
                self.floats[name] = self.floats[point]
        self.findings += checks.ineffective(self.rules, self.floats)
        self.findings += checks.overridden(self.rules)
        self.findings += checks.embeddings(self.rules, self.graph, self.tensors)
        self.findings += axes.misfits(self.misfits)
        rules = tuple(row.summary() for row in self.rules)
        findings = tuple(self.findings)
        plan = Plan(
            graph=self.graph,
            tensors=self.tensors,
            rules=rules,
            floats=self.floats,
            diagnostics=findings,
            settings=self.config.settings,
            off=self.off,
            ungrouped=self.ungrouped,
            joins=tuple(joins),
        )
        return decided_unseen(plan)

    def _plan_parameters(self, node: Node) -> None:
        """Weights and biases of the layers that have them; no single number, nor what only
        float operators read.
        """
        if not node.row.weight or node.name in self.kept:
            return
        if node.op == "parameter":
            stays = not node.is_float or node.name in self.where.floats
            if stays or self.graph.weight(node).numel() <= 1:
                return
        for key in sorted(node.params, key=lambda name: name.startswith("bias")):
            role = parameter_role(key)
            view = axes.parameter_view(self.graph, node, role)
            self._add(node.name, role, Group(node.name, (node.name,)), view)

    def _plan_activation(self, node: Node) -> None:
        """The layer's output, where its group is quantized."""
        join = self.joins.get(node.name)
        group = self.where.groups.get(node.name) or self.watched.get(node.name)
        if join is not None:
            group = join.group
        if node.name in self.where.arguments:
            group = Group(node.name, (node.name,))
        if group is None or self.kept.get(node.name) == OUTSIDE:
            self.floats[node.name] = (
                OUTSIDE if self.kept.get(node.name) == OUTSIDE else self._why_float(node)
            )
            return
        reason = next(
            (self.kept[member] for member in group.members if member in self.kept), None
        )
        readers = self.graph.consumers[node.name]
        if (
            reason is None
            and node.op == "input"
            and readers
            and all(self.kept.get(n) == FIRST_LAST for n in readers)
        ):
            reason = FIRST_LAST
        if reason is None and node.name in self.residual and not self._is_cast(group):
            reason = RESIDUAL
        if reason is None and self._holds_weights(node):
            reason = "keeps the quantization of its weights"
        role: Role = "input" if node.op in ENTRIES else "activation"
        if reason is None and self._add(node.name, role, group, self._view(group)):
            return
        excluded = reason is None and any(
            RANKS[r.found.rank] == "exclude" for r in self._rules_for(group.members)
        )
        self.floats[node.name] = reason or (EXCLUDED if excluded else LEFT_FLOAT)

    def _view(self, group: Group) -> TensorView:
        """What is quantized at the group's point; its features are those that the group's first
        layer makes.
        """
        return axes.activation_view(
            self.graph, self.graph.by_name[group.members[0]], group.point
        )

    def _is_cast(self, group: Group) -> bool:
        """Whether its values are cast to a shorter float, in which large ones cost small ones
        nothing.
        """
        merged = self._merge(self._rules_for(group.members), "activation")
        return merged is not None and merged[0].dtype in CAST_ONLY

    def _holds_weights(self, node: Node) -> bool:
        """Whether the output is rows of weights, quantized alike for all rows: rounding again
        changes nothing.
        """
        weights = self.tensors.get((node.name, "weights")) if node.row.looks_up else None
        if weights is None or weights.spec.ch_axis is not None:
            return False
        merged = self._merge(self._rules_for((node.name,)), "activation")
        if merged is None:
            return False
        spec, _ = merged
        return (
            weights.spec.dtype == spec.dtype
            and weights.spec.bit_width <= spec.bit_width
            and not spec.is_dynamic
        )

    def _why_float(self, node: Node) -> str:
        """In words, for `inspect` and plan.json."""
        served = self.where.served.get(node.name)
        if (
            served == ""
            and node.name in self.where.runs
            and self.graph.consumers[node.name] != ("",)
        ):
            return APART
        if served is not None:
            return f"quantized at {served}" if served else "the network's last activation"
        if node.op in _NO_VALUES:
            return _NO_VALUES[node.op]
        if node.name in self.where.floats and node.is_float:
            return self.where.floats[node.name]
        if node.is_join:
            return OWN
        if node.row.kind == "float":
            return "computed in float"
        if node.dtype is not None and not node.is_float:
            return "not a floating-point tensor"
        if node.row.kind == "unknown" and any(
            self.graph.by_name[name].is_float for name in node.refs()
        ):
            return NO_RULES
        if node.row.keeps_scale:
            return "keeps the quantization of its input"
        return (
            "not an activation"
            if node.row.kind == "structural"
            else "not a floating-point tensor"
        )

    def _plan_inputs(self, node: Node) -> None:
        """The layer's own quantization of what it reads, where a rule for it sets another than
        its producer has.
        """
        rules = self._rules_for((node.name,)) if node.row.kind in ("mac", "compute") else []
        if node.name in self.kept or not any(
            row.found.rank and row.speaks_of("input") for row in rules
        ):
            return
        for role, name in node.input_roles().items():
            if not self.graph.by_name[name].is_float:
                continue
            view = axes.activation_view(self.graph, node, name)
            merged = self._merge(rules, "input")
            if any(
                RANKS[row.found.rank] not in ("all", "weighted") and row.speaks_of("input")
                for row in rules
            ):
                self.stated.add((node.name, role))
            if merged and self._is_quantized(name, axes.fitted(merged[0], view, role)):
                _count(rules, "input")
            else:
                self._add(node.name, role, Group(name, (node.name,)), view)

    def _plan_joined_inputs(self, node: Node) -> None:
        """What the layer multiplies of joins, quantized again as a whole, in case that parts
        keep their own scales.
        """
        for join, product in self.products.get(node.name, ()):
            if join.is_single:
                continue
            whole = self.tensors.get((join.group.point, "activation"))
            role = input_role(self.graph, product)
            if whole is None or role is None or (node.name, role) in self.tensors:
                continue
            self.tensors[node.name, role] = dataclasses.replace(
                whole,
                layer=node.name,
                role=role,
                source=observed_at(self.where, join, product.value),
                members=(node.name,),
            )

    def _plan_argument_inputs(self) -> None:
        """What a layer multiplies of an argument, quantized by the layer: the argument stays as
        it is.
        """
        for name, products in self.where.arguments.items():
            role = "input" if self.graph.by_name[name].op in ENTRIES else "activation"
            whole = self.tensors.pop((name, role), None)
            if whole is None:
                continue
            self.floats[name] = ARGUMENT
            for product in products:
                for key, value in self.graph.by_name[product.layer].input_roles().items():
                    if value == product.value and (product.layer, key) not in self.tensors:
                        own = dataclasses.replace(
                            whole,
                            layer=product.layer,
                            role=key,
                            source=value,
                            members=(product.layer,),
                        )
                        self.tensors[product.layer, key] = own

    def _is_quantized(self, name: str, spec: QuantizationSpec) -> bool:
        """Whether values come from a quantizer with this spec already; moved values keep but
        one scale for all.
        """
        point = quantization_point(self.graph, self.where, name) or name
        made = "input" if self.graph.by_name[point].op in ENTRIES else "activation"
        producer = self.tensors.get((point, made))
        same = producer is not None and effective(producer.spec) == effective(spec)
        return same and (
            point == name or (spec.qscheme == "per_tensor" and not spec.is_dynamic)
        )

    def _add(self, layer: str, role: str, group: Group, view: TensorView) -> bool:
        """Resolve and record one tensor; False when the config leaves it float."""
        base, rules = base_role(role), self._rules_for(group.members)
        merged = self._merge(rules, base)
        if merged is None:
            _count_silenced(rules, base)
            return False
        spec, sources = axes.fitted(merged[0], view, role), merged[1]
        stated = {name: sources[name].origin for name in _FIELDS if name in sources}
        origins = {
            name: stated.get(name, "default")
            for name in _FIELDS
            if name in stated or name not in _DERIVED
        }
        weakest_first = [row.rule for row in rules]
        found = [
            *checks.conflicting(layer, base, spec, sources, self.config, weakest_first),
            *checks.under_float(base, spec, weakest_first),
        ]
        is_refused = any(finding.severity == "error" for finding in found)
        if not is_refused:
            found += axes.impossible(layer, role, spec, view, sources)
            is_refused = any(finding.severity == "error" for finding in found)
        self.findings += [
            f
            for f in found
            if not any(f.code == g.code and f.place == g.place for g in self.findings)
        ]
        misfit = axes.misfit(layer, role, spec, view, sources)
        _count(rules, base)
        if misfit and is_parameter(role) and is_apart(self.graph, self.graph.by_name[layer]):
            self.ungrouped[(layer, role)] = (
                f"groups of {misfit.group_size} do not divide {misfit.length}"
            )
            return False
        self.misfits += [misfit] if misfit else []
        if spec.dtype == "float32":
            self.off[(layer, role)] = origins["dtype"]
            return False
        scales = 0  # that a parameter has
        if is_parameter(role) and spec.is_scaled and not is_refused:
            sizes = tuple(size or 0 for size in view.sizes or ())
            scales = math.prod(scale_shape(sizes, spec.cut))
        self.tensors[(layer, role)] = TensorPlan(
            layer, role, spec, origins, group.point, group.members, scales
        )
        return True

    def _rules_for(self, members: Iterable[str]) -> list[MatchedRule]:
        """The rules that speak about any of the layers, weakest first; equal ranks in the
        file's order.
        """
        wanted = set(members)
        return sorted(
            (r for r in self.rules if wanted.intersection(r.found.layers)),
            key=lambda row: row.found.rank,
        )

    def _merge(
        self, rules: list[MatchedRule], role: Role
    ) -> tuple[QuantizationSpec, dict[str, Sourced]] | None:
        """The effective spec, each field from the strongest rule that sets it; None if the last
        word is "float".
        """
        quantized = True
        for row in rules:
            quantized = row.quantizes(role, quantized)
        if not quantized:
            return None
        values = merged([row.rule.fields.get(role, {}) for row in rules], role)
        spec = with_finest_position(
            QuantizationSpec.of(values), self.config.settings.target_device
        )
        # Of a parameter there is one batch, with all values
        is_pooled = spec.method == AUTO and not is_parameter(role)
        return (dataclasses.replace(spec, statistic=POOLED) if is_pooled else spec), values


def _count(rules: list[MatchedRule], role: Role) -> None:
    """Note for each rule that it set something for this tensor."""
    for row in rules:
        row.effects += bool(row.rule.fields.get(role))


def _count_silenced(rules: list[MatchedRule], role: Role) -> None:
    """Note for each rule for some layers that it leaves this tensor float, which weaker ones do
    not.
    """
    quantized = True
    for row in rules:
        before, quantized = quantized, row.quantizes(role, quantized)
        row.effects += bool(row.found.rank) and before and not quantized
