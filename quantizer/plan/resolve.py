"""Resolve a config and a graph to a plan: decide for every tensor whether and how it is
quantized. No tensor is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quantizer.config.model import CAST_ONLY, QuantizationSpec, ResolvedConfig, Role
from quantizer.config.roles import base_role, is_parameter, parameter_role
from quantizer.config.rules.spec_rules import effective
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.granularity import scale_shape
from quantizer.plan import axes, checks
from quantizer.plan.axes import Misfit, PlannedTensor, TensorView
from quantizer.plan.floating import OUTSIDE, RESIDUAL
from quantizer.plan.groups import layout
from quantizer.plan.joining import joins
from quantizer.plan.layout import Group, quantization_point
from quantizer.plan.match import (
    FIRST_LAST,
    MatchedRule,
    MergedSpec,
    count_effects,
    count_silenced,
    field_origins,
    is_apart,
    layers_kept_float,
    match,
    merged_spec,
    residual,
)
from quantizer.plan.model import RANKS, JoinPlan, Key, Plan, TensorPlan, output_role

if TYPE_CHECKING:
    from quantizer.plan.cached_values import PlannedValue

EXCLUDED = "excluded"
LEFT_FLOAT = "the config leaves it float"
NO_RULES = "operator without quantization rules"
_SEPARATE_PARTS = "holds parts that nothing reads which needs one scale for them"
_NO_VALUES = {
    "constant": "a constant",
    "module": "a module without weights that can be quantized",
}


def resolve_plan(config: ResolvedConfig, graph: Graph, original: Graph) -> Plan:
    """Return the plan of `config` for `graph`.

    The plan's `diagnostics` contain errors as well: selectors that match nothing, and conflicts
    between merged entries. Users may also write names of the `original` graph before passes.
    """
    plan = _Resolver(config, graph, original).plan()
    if config.settings.target_device != "DPU":
        return plan
    # Only the DPU needs it
    from quantizer.plan.dpu_support import with_dpu_findings

    return with_dpu_findings(plan)


class _Resolver:
    """Resolves one config and graph, and holds the decisions so far.

    Attributes:
        joins: the joins on which calibration decides, by the layer where they are quantized.
        products: the joins that each multiplying layer reads.
        watched: parts of joins that are observed and not quantized on their own.
        kept_float: the layers that a switch or stubs keep float, with the reason.
        tensors: the quantized tensors.
        floats: the layers whose output stays float, with the reason.
        off: the tensors that an entry sets to float32, with its place.
        stated: the layers' own inputs that an entry for a type or name asks to quantize.
        ungrouped: the parameters that stay float because no group size fits, with the reason.
        cached: the keys and values of attentions that are quantized, by their key.
        findings: diagnostics.
        misfits: the tensors whose group size does not fit, which is an error.
    """

    def __init__(self, config: ResolvedConfig, graph: Graph, original: Graph) -> None:
        self.config = config
        self.graph = graph
        self.rules: list[MatchedRule] = []
        for rule in config.rules:
            self.rules.append(MatchedRule(rule, match(rule.selector, graph, original)))
        self.layout = layout(graph, joins.single_joins(config, graph, self.rules))
        self.joins = joins.open_joins(self.layout)
        self.products = joins.products_of(self.joins.values())
        self.watched = joins.parts_to_observe(self.joins.values())
        self.kept_float = layers_kept_float(config, graph, self.rules)
        self.residual = residual(config, graph, self.rules)
        self.tensors: dict[Key, TensorPlan] = {}
        self.floats: dict[str, str] = {}
        self.off: dict[Key, str] = {}
        self.stated: set[Key] = set()
        self.ungrouped: dict[Key, str] = {}
        self.findings = list(checks.unmatched_selectors(config.form, self.rules, original))
        self.cached: dict[Key, PlannedValue] = {}
        if any(row.match.keys or row.match.named for row in self.rules):
            # Only caches of keys and values need them
            from quantizer.plan.cached_values import cache_findings, planned_values

            self.cached = planned_values(self.rules, graph)
            self.findings += cache_findings(self.rules, graph, self.cached.values())
        self.misfits: list[Misfit] = []

    def plan(self) -> Plan:
        """Decide layer by layer, and return the plan."""
        for node in self.graph.nodes:
            self._plan_parameters(node)
            self._plan_activation(node)
            self._plan_inputs(node)
            self._plan_cached_values(node)
            self._plan_joined_inputs(node)
        self._plan_argument_inputs()
        join_plans: list[JoinPlan] = []
        if self.layout.joins or self.layout.blends:
            # Only networks with joins need it
            from quantizer.plan.joining.join_planner import JoinPlanner

            planner = JoinPlanner(self.layout, self.graph, self.tensors, stated=self.stated)
            observed = planner.unplanned_parts()
            self.tensors |= observed
            join_plans = planner.plans(observed)
        # A value that would be quantized at another layer stays float for that layer's reason
        for name, point in self.layout.served.items():
            is_planned = (name, "activation") in self.tensors
            if point in self.layout.groups and point in self.floats and not is_planned:
                self.floats[name] = self.floats[point]
        self.findings += checks.ineffective(self.rules, self.floats)
        self.findings += checks.of_tensors(self.config, self.rules, self.graph, self.tensors)
        if self.misfits:
            # Only faults need it
            from quantizer.plan.misfits import misfit_findings

            self.findings += misfit_findings(self.misfits)
        plan = Plan(
            graph=self.graph,
            tensors=self.tensors,
            rules=tuple(row.summary() for row in self.rules),
            floats=self.floats,
            diagnostics=tuple(self.findings),
            settings=self.config.settings,
            off=self.off,
            ungrouped=self.ungrouped,
            joins=tuple(join_plans),
        )
        return joins.decided_unseen(plan)

    def _plan_parameters(self, node: Node) -> None:
        """Plan the weights and biases of a layer.

        Of trained tensors in expressions, single numbers and those that only float operators
        read stay float.
        """
        if not node.row.weight or node.name in self.kept_float:
            return
        if node.op == "parameter":
            stays_float = not node.is_float or node.name in self.layout.floats
            if stays_float or self.graph.weight(node).numel() <= 1:
                return
        # Weights first, then biases
        for key in sorted(node.params, key=lambda name: name.startswith("bias")):
            role = parameter_role(key)
            view = axes.parameter_view(self.graph, node, role)
            self._decide(node.name, role, Group(node.name, (node.name,)), view)

    def _plan_activation(self, node: Node) -> None:
        """Plan the layer's output if its group is quantized there, or note why it is not."""
        group = self._group_of(node)
        if self.kept_float.get(node.name) == OUTSIDE:
            self.floats[node.name] = OUTSIDE
        elif group is None:
            self.floats[node.name] = self._why_float(node)
        else:
            reason = self._why_group_stays_float(node, group)
            if reason:
                self.floats[node.name] = reason
            elif not self._decide(node.name, output_role(node), group, self._view(group)):
                ranks = {RANKS[rule.match.rank] for rule in self._rules_for(group.members)}
                self.floats[node.name] = EXCLUDED if "exclude" in ranks else LEFT_FLOAT

    def _group_of(self, node: Node) -> Group | None:
        """Return the group that is quantized at the layer's output, if any."""
        if node.name in self.layout.arguments:
            return Group(node.name, (node.name,))
        if node.name in self.joins:
            return self.joins[node.name].group
        return self.layout.groups.get(node.name) or self.watched.get(node.name)

    def _why_group_stays_float(self, node: Node, group: Group) -> str | None:
        """Return why the output of a group stays float; None if the config decides."""
        for member in group.members:
            if member in self.kept_float:
                return self.kept_float[member]
        readers = self.graph.consumers[node.name]
        reasons = {self.kept_float.get(name) for name in readers}
        if node.op == "input" and reasons == {FIRST_LAST}:
            return FIRST_LAST
        if node.name in self.residual and not self._is_cast(group):
            return RESIDUAL
        if self._has_quantized_rows(node):
            return "keeps the quantization of its weights"
        return None

    def _view(self, group: Group) -> TensorView:
        """Return the view that the group's first layer has of the value that is quantized at
        the group's point.
        """
        first = self.graph.by_name[group.members[0]]
        return axes.activation_view(self.graph, first, group.point)

    def _is_cast(self, group: Group) -> bool:
        """Return whether the group's values are cast to a float format. Then large values do
        not make small ones less precise.
        """
        spec, _ = self._merge(self._rules_for(group.members), "activation")
        return spec is not None and spec.dtype in CAST_ONLY

    def _has_quantized_rows(self, node: Node) -> bool:
        """Return whether the output consists of rows of weights that have one scale, as that of
        an embedding does. Rounding these rows again would change nothing.
        """
        if not node.row.looks_up:
            return False
        weights = self.tensors.get((node.name, "weights"))
        if weights is None or weights.spec.ch_axis is not None:
            return False
        spec, _ = self._merge(self._rules_for((node.name,)), "activation")
        if spec is None or spec.is_dynamic or weights.spec.dtype != spec.dtype:
            return False
        return weights.spec.bit_width <= spec.bit_width

    def _why_float(self, node: Node) -> str:
        """Return why no group is quantized at the layer's output, for `inspect` and
        plan.json.
        """
        if node.name in self.layout.served:
            return f"quantized at {self.layout.served[node.name]}"
        if node.name in self.layout.unneeded:
            is_output = self.graph.consumers[node.name] == ("",)
            if node.name in self.layout.runs and not is_output:
                return _SEPARATE_PARTS
            return "the network's last activation"
        if node.op in _NO_VALUES:
            return _NO_VALUES[node.op]
        if node.name in self.layout.floats and node.is_float:
            return self.layout.floats[node.name]
        if node.is_join:
            return joins.OWN
        if node.row.kind == "float":
            return "computed in float"
        if node.dtype is not None and not node.is_float:
            return "not a floating-point tensor"
        if node.row.kind == "unknown":
            for name in node.refs():
                if self.graph.by_name[name].is_float:
                    return NO_RULES
        if node.row.keeps_scale:
            return "keeps the quantization of its input"
        if node.row.kind == "structural":
            return "not an activation"
        return "not a floating-point tensor"

    def _plan_inputs(self, node: Node) -> None:
        """Plan the layer's own quantization of its inputs.

        It has one if a rule about inputs selects the layer, and the inputs' producers do not
        quantize them with the same spec.
        """
        if node.row.kind not in ("mac", "compute") or node.name in self.kept_float:
            return
        rules = self._rules_for((node.name,))
        ranks = [row.match.rank for row in rules if row.configures("input")]
        # Rank 0 is that of rules for all layers
        if not any(ranks):
            return
        is_stated = any(RANKS[rank] not in ("all", "weighted") for rank in ranks)
        for role, name in node.input_roles().items():
            if not self.graph.by_name[name].is_float:
                continue
            view = axes.activation_view(self.graph, node, name)
            if is_stated:
                self.stated.add((node.name, role))
            spec, _ = self._merge(rules, "input")
            if spec and self._is_quantized(name, axes.fit_spec(spec, view, role)):
                count_effects(rules, "input")
            else:
                self._decide(node.name, role, Group(name, (node.name,)), view)

    def _plan_cached_values(self, node: Node) -> None:
        """Plan the keys and values that a node reads, if a rule is about them."""
        for role in node.input_roles():
            key = (node.name, role)
            if key in self.cached:
                planned = self.cached[key]
                self.stated.add(key)
                self._decide(*key, planned.group, planned.view, rules=[planned.rule])

    def _plan_joined_inputs(self, node: Node) -> None:
        """Plan a quantizer at the layer's input for each join that it multiplies.

        It quantizes the join as a whole, and is used if calibration decides that the parts keep
        their own scales.
        """
        if node.name in self.kept_float:
            return
        for join, product in self.products.get(node.name, ()):
            if join.is_single:
                continue
            whole = self.tensors.get((join.group.point, "activation"))
            role = joins.input_role(self.graph, product)
            if whole is None or role is None or (node.name, role) in self.tensors:
                continue
            source = joins.observed_at(self.layout, join, product.value)
            self._plan_input_like(whole, node.name, role, source)

    def _plan_argument_inputs(self) -> None:
        """Move the quantizer of an argument that stays float to the layers that multiply it."""
        for name, products in self.layout.arguments.items():
            whole = self.tensors.pop((name, output_role(self.graph.by_name[name])), None)
            if whole is None:
                continue
            reason = self.layout.floats[name]
            self.floats[name] = reason
            for product in products:
                for role, value in self.graph.by_name[product.layer].input_roles().items():
                    if value == product.value and (product.layer, role) not in self.tensors:
                        self._plan_input_like(whole, product.layer, role, value)

    def _plan_input_like(self, tensor: TensorPlan, layer: str, role: str, source: str) -> None:
        """Plan the input of a layer with the spec of another tensor."""
        self.tensors[layer, role] = dataclasses.replace(
            tensor, layer=layer, role=role, source=source, members=(layer,)
        )

    def _is_quantized(self, name: str, spec: QuantizationSpec) -> bool:
        """Return whether the values of a node are quantized with this spec already.

        If operators have moved the values since they were quantized, that is true only of a
        single static scale.
        """
        point = quantization_point(self.graph, self.layout, name) or name
        producer = self.tensors.get((point, output_role(self.graph.by_name[point])))
        if producer is None or effective(producer.spec) != effective(spec):
            return False
        return point == name or (spec.qscheme == "per_tensor" and not spec.is_dynamic)

    def _decide(
        self,
        layer: str,
        role: str,
        group: Group,
        view: TensorView,
        *,
        rules: list[MatchedRule] | None = None,
    ) -> bool:
        """Decide one tensor, and return whether it is quantized. `rules` are those for the
        group's members, unless others are given.
        """
        base = base_role(role)
        if rules is None:
            rules = self._rules_for(group.members)
        spec, sources = self._merge(rules, base)
        if spec is None:
            count_silenced(rules, base)
            return False
        spec = axes.fit_spec(spec, view, role)
        tensor = PlannedTensor(layer, role, spec, view, sources)
        is_refused = self._check(tensor, rules)
        misfit = axes.misfit(tensor)
        count_effects(rules, base)
        if misfit is not None:
            # Depthwise kernels and position embeddings stay float; for others it is an error
            if is_parameter(role) and is_apart(self.graph, self.graph.by_name[layer]):
                reason = f"groups of {misfit.group_size} do not divide {misfit.length}"
                self.ungrouped[layer, role] = reason
                return False
            self.misfits.append(misfit)
        origins = field_origins(sources)
        if spec.dtype == "float32":
            self.off[layer, role] = origins["dtype"]
            return False
        scales = 0
        if is_parameter(role) and spec.is_scaled and not is_refused:
            sizes = tuple(size or 0 for size in view.sizes or ())
            scales = math.prod(scale_shape(sizes, spec.cut))
        self.tensors[layer, role] = TensorPlan(
            layer, role, spec, origins, source=group.point, members=group.members, scales=scales
        )
        return True

    def _check(self, tensor: PlannedTensor, rules: list[MatchedRule]) -> bool:
        """Record the new findings about a tensor, and return whether one is an error."""
        weakest_first = [row.rule for row in rules]
        findings = list(checks.of_tensor(tensor, self.config, weakest_first))
        if not any(finding.severity == "error" for finding in findings):
            findings += axes.impossible(tensor)
        known = {(finding.code, finding.place) for finding in self.findings}
        for finding in findings:
            if (finding.code, finding.place) not in known:
                self.findings.append(finding)
        return any(finding.severity == "error" for finding in findings)

    def _rules_for(self, members: Iterable[str]) -> list[MatchedRule]:
        """Return the rules for any of the layers, weakest first, and in the file's order if
        they are equally strong.
        """
        layers = set(members)
        rules = [row for row in self.rules if row.selects(layers)]
        return sorted(rules, key=lambda row: row.match.rank)

    def _merge(self, rules: list[MatchedRule], role: Role) -> MergedSpec:
        return merged_spec(rules, role, self.config.settings.target_device)
