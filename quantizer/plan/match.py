"""The layers to which the rules of a config apply, and what all rules for a tensor set. The
layers that switches and stubs keep float.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from quantizer.config.diagnostics import Sourced
from quantizer.config.model import (
    AUTO_METHOD,
    POOLED,
    ConfigRule,
    Fields,
    QuantizationSpec,
    ResolvedConfig,
    Role,
    Selector,
)
from quantizer.config.roles import is_parameter
from quantizer.config.rules.spec_rules import is_foreign, other_weight_axis
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.formats import SHARED_EXPONENTS
from quantizer.plan.floating import (
    OUTSIDE,
    SCALED,
    before_norms,
    derived_layers,
    outside_stubs,
    scaled_inputs,
)
from quantizer.plan.model import RANKS, Match, RuleMatch

MergedSpec = tuple[QuantizationSpec | None, dict[str, Sourced]]
"""A spec and the origin of each field that a rule sets."""
_KINDRED = frozenset(
    {
        "bit_width",
        "signed",
        "symmetric",
        "narrow_range",
        "symmetric_scale",
        "round_mode",
        "scale_mode",
    }
)
"""Fields that integers do not inherit from floating-point formats, nor these from integers."""
_QSCHEMES_WITH_AXIS = {"per_channel", "per_group"}
_SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(QuantizationSpec))
_DERIVED_FIELDS = ("ch_axis", "finest_position")
"""Fields whose default depends on the layer or on the device, so that their origin is not
"default".
"""
FIRST_LAST = "keep_first_last_layer_accuracy"
ROUTER = "chooses experts, and engines compute it in float"
_ENTRIES = ("input", "module_input")


@dataclass
class MatchedRule:
    """A rule with the match of its selector. `effects` counts the tensors for which it sets
    something.
    """

    rule: ConfigRule
    match: Match
    effects: int = 0

    def configures(self, role: Role) -> bool:
        """Return whether it says how, or whether, tensors of a role are quantized."""
        roles = (*(self.rule.roles or ()), *self.rule.adds)
        return role in roles or bool(self.rule.fields.get(role))

    def selects(self, layers: Set[str]) -> bool:
        """Return whether it selects one of the layers with all tensors. A rule with keys
        selects these inputs only.
        """
        return not self.match.keys and not layers.isdisjoint(self.match.layers)

    def quantizes(self, role: Role, before: bool) -> bool:
        """Return whether the role is quantized after the rule. A rule without roles leaves it
        as it was `before`.
        """
        if role in self.rule.adds:
            return True
        return before if self.rule.roles is None else role in self.rule.roles

    def summary(self) -> RuleMatch:
        """Return the entry of the plan."""
        selector = self.rule.selector
        return RuleMatch(
            label=self.rule.label,
            selector=selector.text or selector.kind,
            layers=self.match.layers,
            took_effect=self.effects,
            place=str(selector.place or ""),
            leaves_float=self.rule.leaves_float and self.match.rank >= RANKS.index("type"),
        )


def match(selector: Selector, graph: Graph, original: Graph) -> Match:
    """Return the layers of `graph` that `selector` matches. `original` is the graph as traced,
    before layers were folded.

    The name of a folded layer selects the layer it was folded into, its type does not.
    """
    if selector.kind == "all":
        return Match(tuple(graph.by_name), RANKS.index("all"))
    if selector.kind == "weighted":
        weighted: list[str] = []
        for node in graph.nodes:
            if has_own_weights(node):
                weighted.append(node.name)
        return Match(tuple(weighted), RANKS.index("weighted"))
    from quantizer.plan.selected import attentions, by_name, by_type

    if selector.kind == "type":
        return by_type(selector.text, graph, original)
    named = by_name(selector.text, graph, original)
    if selector.kind == "exclude":
        return replace(named, rank=RANKS.index("exclude"))
    if selector.kind == "cache":
        return attentions(named, graph)
    if selector.kind == "cache_source":
        # The cache is quantized even if the layers that compute it are excluded
        rank = RANKS.index("cache")
        return replace(named, rank=rank, named=named.layers)
    return named


def has_own_weights(node: Node) -> bool:
    """Return whether the node is a module such as Linear, with weights of its own. A trained
    tensor in an expression is none.
    """
    if node.op in ("parameter", "channel_scale"):
        return False
    return node.row.weight and bool(node.params)


def merge_fields(blocks: Sequence[Fields], role: Role) -> dict[str, Sourced]:
    """Return each field from the strongest rule that sets it. `blocks` are the rules' fields
    for one role, weakest first.

    A shared exponent belongs to the format that states it, just as the symmetry and the
    rounding of integers belong to integers. The axis changes if channels with a scale each
    become groups, or groups become channels.

    >>> words = {"dtype": Sourced("int"), "symmetric": Sourced(False)}
    >>> merge_fields([words, {"dtype": Sourced("fp4")}], "weights")
    {'dtype': Sourced(value='fp4', place=None)}
    """
    last_dtype = None
    for fields in blocks:
        if "dtype" in fields:
            last_dtype = fields["dtype"].value
    values: dict[str, Sourced] = {}
    dtype: str | None = None
    for fields in blocks:
        if "dtype" in fields:
            new_dtype = fields["dtype"].value
            if _ends_scale_type(_value(values, "scale_type"), dtype, new_dtype):
                del values["scale_type"]
            dtype = new_dtype
        qscheme = _value(values, "qscheme")
        axis = values.get("ch_axis")
        is_inherited = not is_foreign(dtype, last_dtype)
        for name, sourced in fields.items():
            if is_inherited or name not in _KINDRED:
                values[name] = sourced
        qschemes = {qscheme, _value(values, "qscheme")}
        if axis and "ch_axis" not in fields and qschemes == _QSCHEMES_WITH_AXIS:
            del values["ch_axis"]
            new_axis = other_weight_axis(axis, role)
            if new_axis:
                values["ch_axis"] = new_axis
    return values


def _ends_scale_type(scale_type: object, dtype: str | None, new_dtype: str) -> bool:
    """Return whether a scale type does not apply to the format that replaces its own."""
    if scale_type == "e4m3":
        return is_foreign(dtype, new_dtype)
    return scale_type == "superblock" or scale_type in SHARED_EXPONENTS


def _value(values: Fields, name: str) -> object:
    return values[name].value if name in values else None


def merged_spec(rules: Sequence[MatchedRule], role: Role, device: str) -> MergedSpec:
    """Return the effective spec with the origin of each field, taken from the strongest rule
    that sets it. `rules` are sorted weakest first. The spec is None if the last rule about the
    role says float.
    """
    is_quantized = True
    for row in rules:
        is_quantized = row.quantizes(role, is_quantized)
    if not is_quantized:
        return None, {}
    values = merge_fields([row.rule.fields.get(role, {}) for row in rules], role)
    spec = with_finest_position(QuantizationSpec.of(values), device)
    # A parameter is one batch with all values
    if spec.method == AUTO_METHOD and not is_parameter(role):
        spec = dataclasses.replace(spec, statistic=POOLED)
    return spec, values


def count_effects(rules: Sequence[MatchedRule], role: Role) -> None:
    """Count for each rule that it set something for this tensor."""
    for row in rules:
        row.effects += bool(row.rule.fields.get(role))


def count_silenced(rules: Sequence[MatchedRule], role: Role) -> None:
    """Count for each rule for some layers that it leaves this tensor float, which weaker rules
    quantize.
    """
    is_quantized = True
    for row in rules:
        was_quantized = is_quantized
        is_quantized = row.quantizes(role, was_quantized)
        if row.match.rank and was_quantized and not is_quantized:
            row.effects += 1


def with_finest_position(spec: QuantizationSpec, device: str) -> QuantizationSpec:
    """Return the spec with the limit of `device` on its scales. The DPU's have at most 12
    fraction bits up to 8 bits, 15 above. Other devices have no limit.

    Source: pytorch_nndct 3.5.
    """
    if device != "DPU" or spec.dtype != "int" or spec.scale_type != "poweroftwo":
        return spec
    finest_position = 12 if spec.bit_width <= 8 else 15
    return dataclasses.replace(spec, finest_position=finest_position)


def field_origins(sources: Mapping[str, Sourced]) -> dict[str, str]:
    """Return where the value of each field of a spec came from."""
    origins: dict[str, str] = {}
    for name in _SPEC_FIELDS:
        if name in sources:
            origins[name] = sources[name].origin
        elif name not in _DERIVED_FIELDS:
            origins[name] = "default"
    return origins


def residual(config: ResolvedConfig, graph: Graph, rules: list[MatchedRule]) -> set[str]:
    """Return the layers of the residual stream, which only normalizations read.

    Layers that the config selects by type or name are not among them. For the DPU, which stores
    integers only, and in the hierarchical form, which states the outputs to quantize, return no
    layers.
    """
    if config.form == "hierarchical" or config.settings.target_device == "DPU":
        return set()
    layers = before_norms(graph)
    for rule in rules:
        # Only the selector "all" has rank 0
        if rule.match.rank:
            layers.difference_update(rule.match.layers)
    return layers


def layers_kept_float(
    config: ResolvedConfig, graph: Graph, rules: list[MatchedRule]
) -> dict[str, str]:
    """Return the layers that a global switch or the model's stubs keep in float, with the
    reason, and the routers of experts that no rule names.
    """
    reasons = dict.fromkeys(outside_stubs(graph), OUTSIDE)
    scaled = scaled_inputs(graph)
    reasons.update(dict.fromkeys(scaled, SCALED))
    routers: list[str] = []
    if any(node.row.experts or "experts." in node.scope for node in graph.nodes):
        from quantizer.graph.structure.transformer_parts import router_layers

        routers = router_layers(graph)
    named: set[str] = set()
    for rule in rules:
        if RANKS[rule.match.rank] not in ("all", "weighted", "type"):
            named.update(rule.match.layers)
    for router in routers:
        if router not in named:
            reasons[router] = ROUTER
    if config.settings.keep_first_last_layer_accuracy:
        weighted = []
        for node in graph.nodes:
            if node.row.weight and node.params and node.op != "parameter":
                weighted.append(node.name)
        reasons.update(dict.fromkeys(weighted[:1] + weighted[-1:], FIRST_LAST))
    if config.settings.keep_add_layer_accuracy:
        for node in graph.nodes:
            if node.op == "add":
                reasons[node.name] = "keep_add_layer_accuracy"
    return reasons


def is_apart(graph: Graph, node: Node) -> bool:
    """Return whether the layer is a convolution whose kernels read one channel each, or an
    embedding of positions.
    """
    if node.row.spatial:
        is_transposed = node.row.transposed
        return not is_transposed and graph.weight(node).shape[1] == 1
    return node.row.looks_up and not _looks_up_tokens(graph, node)


def _looks_up_tokens(graph: Graph, node: Node) -> bool:
    """Return whether the indices are those of an input, at most moved. Indices that are
    computed, from these or from sizes, are positions.
    """
    source = graph.source(node)
    while source is not None and source.row.only_moves:
        source = graph.source(source)
    if source is None or source.op in _ENTRIES:
        return True
    return source.name not in derived_layers(graph)
