"""Checks of a config that need a model. Each finding has the place in the file that causes
it.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from quantizer.config.algorithms import keeps_super_blocks, named_algorithms
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.forms.form import Form
from quantizer.config.model import ConfigRule, ResolvedConfig
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.rules.check_layered import refused_under_float
from quantizer.config.rules.spec_rules import conflicts
from quantizer.config.wording import listed
from quantizer.graph.ir import Graph
from quantizer.plan.axes import PlannedTensor
from quantizer.plan.match import MatchedRule
from quantizer.plan.model import RANKS, Key, TensorPlan


def unmatched_selectors(
    form: Form, rules: Sequence[MatchedRule], original: Graph
) -> Iterator[Diagnostic]:
    """Yield an error, with the closest names, for each selector that matches no layer.

    Yield a note for each selector that matched by another spelling of its text.
    """
    for row in rules:
        selector = row.rule.selector
        if row.match.note:
            yield Diagnostic("QZ404", row.match.note, selector.place, "note")
        is_matched = bool(row.match.layers or row.match.named)
        if is_matched or selector.kind == "all" or not selector.required:
            continue
        from quantizer.plan.selected import SELECTED_KINDS, advice, how_to_list_layers, key_of

        if selector.text in SELECTED_KINDS:
            continue
        if selector.kind == "weighted":
            # An empty block has nothing to apply
            if row.rule.fields:
                yield Diagnostic(
                    "QZ402",
                    f"{row.rule.label} applies to no layer: {original.model} has none with "
                    "weights of its own",
                    selector.place,
                    help=how_to_list_layers(),
                )
        elif row.match.absorbed:
            yield Diagnostic(
                "QZ402",
                f"all {len(row.match.absorbed)} layers of type {selector.text!r} are folded "
                "into the layers before them",
                selector.place,
                help="select those layers instead, by type or by name",
            )
        else:
            yield Diagnostic(
                "QZ402",
                f"{key_of(selector, form)} {selector.text!r} matches no layer",
                selector.place,
                help=advice(selector, original),
            )


def overridden(rules: Sequence[MatchedRule]) -> Iterator[Diagnostic]:
    """Yield a warning for each rule that overrides an equally specific one for some layer."""
    # The last rule so far, by rank and layer, or the key of an input
    owner: dict[tuple[int, str | Key], int] = {}
    for index, row in enumerate(rules):
        if not row.match.rank:
            continue
        selected: Sequence[str | Key] = row.match.keys or row.match.layers
        keys = [(row.match.rank, place) for place in selected]
        earlier = {owner[key] for key in keys if key in owner}
        for other in sorted(earlier):
            if _disagree(row.rule, rules[other].rule):
                labels = f"{row.rule.label} overrides {rules[other].rule.label}"
                text = f"{labels}: both select by {RANKS[row.match.rank]}"
                yield Diagnostic("QZ403", text, row.rule.selector.place, "warning")
        owner.update(dict.fromkeys(keys, index))


def _disagree(rule: ConfigRule, other: ConfigRule) -> bool:
    """Return whether two rules for one layer disagree about a tensor, or about which tensors
    are quantized.
    """
    sets_roles = rule.roles is not None or other.roles is not None
    if not sets_roles and rule.fields.keys().isdisjoint(other.fields):
        return False
    return rule.fields != other.fields


def embeddings(
    rules: Sequence[MatchedRule], graph: Graph, planned: Container[Key]
) -> Iterator[Diagnostic]:
    """Yield a note about embeddings that only the global block selects. Other tools leave them
    float.
    """
    global_rules = []
    selected: set[str] = set()
    for row in rules:
        if not row.rule.fields.get("weights"):
            continue
        if row.rule.selector.kind == "weighted":
            global_rules.append(row.rule)
        if row.match.rank > RANKS.index("weighted"):
            selected.update(row.match.layers)
    names = []
    for node in graph.nodes:
        if node.row.looks_up and (node.name, "weights") in planned:
            names.append(node.name)
    reached = [name for name in names if name not in selected]
    if global_rules and reached:
        label = global_rules[0].label
        yield Diagnostic(
            "QZ409",
            f"{label} also quantizes the weights of embeddings: {', '.join(reached)}",
            global_rules[0].selector.place,
            "note",
            help="add them to exclude to leave them in float, or give them an entry in "
            "layer_quant_config",
        )


def of_tensors(
    config: ResolvedConfig,
    rules: Sequence[MatchedRule],
    graph: Graph,
    tensors: Mapping[Key, TensorPlan],
) -> Iterator[Diagnostic]:
    """Yield findings about all tensors of a plan."""
    yield from overridden(rules)
    yield from embeddings(rules, graph, tensors)
    yield from dynamic_sizes(config, graph, tensors.values())
    yield from left_to_search(config, graph, tensors)


def left_to_search(
    config: ResolvedConfig, graph: Graph, tensors: Mapping[Key, TensorPlan]
) -> Iterator[Diagnostic]:
    """Yield an error for each algorithm with nothing to round, because all weights have formats
    whose scales are searched.
    """
    dtypes: dict[str, bool] = {}
    for (layer, role), tensor in tensors.items():
        spec = tensor.spec
        if role == "weights" and spec.is_scaled and not graph.by_name[layer].row.looks_up:
            dtypes[spec.dtype] = spec.scale_type == "superblock"
    if not dtypes or not all(dtypes.values()):
        return
    others = named_algorithms(lambda kind: kind.needs_groups)
    write = f"write {others}, which searches the scales by the data, or " if others else ""
    for algorithm in config.algorithms:
        if keeps_super_blocks(algorithm.kind):
            yield Diagnostic(
                "QZ361",
                f"groups of {listed(dtypes)} share the factor of their scales, which "
                f"{algorithm.name} cannot change: it has nothing to do",
                algorithm.place,
                help=f"{write}quantize to int4 or iq4_nl",
            )


def dynamic_sizes(
    config: ResolvedConfig, graph: Graph, tensors: Iterable[TensorPlan]
) -> Iterator[Diagnostic]:
    """Yield errors where a config needs fixed sizes, and --dynamic leaves them open: for the
    DPU, which is compiled for sizes, and for a scale per position.
    """
    settings = config.settings
    names = [length.name for length in graph.lengths if length.is_asked_for]
    if not names:
        return
    for tensor in tensors:
        spec = tensor.spec
        open_axes = graph.by_name[tensor.source].open_axes
        is_scaled = not is_parameter(tensor.role) and not spec.is_dynamic
        if is_scaled and spec.ch_axis in open_axes:
            yield Diagnostic(
                "QZ348",
                f"{tensor.role} of {tensor.layer} has a scale for each index of axis "
                f"{spec.ch_axis}, whose size <--dynamic> leaves open",
                None,
                help="set ch_axis to that of the channels, or leave <--dynamic> out",
            )
    if settings.target_device == "DPU":
        yield Diagnostic(
            "QZ347",
            f"the DPU runs one size, and <--dynamic> leaves {listed(names)} open",
            settings.places.get("target_device"),
            help="leave <--dynamic> out, or use a config for the CPU, such as cpu_int8.json",
        )


def ineffective(
    rules: Sequence[MatchedRule], floats: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """Yield a warning for each rule that matches layers but sets nothing."""
    for row in rules:
        layers = row.match.layers
        kind = row.rule.selector.kind
        is_empty = kind == "weighted" and not row.rule.fields
        if not layers or row.effects or kind == "all" or is_empty:
            continue
        reason = floats.get(layers[0], "the layer has no tensor of the listed kinds")
        outcome = "changes no tensor"
        if kind == "exclude":
            outcome = "there is nothing to quantize"
        text = f"{row.rule.label} matches {len(layers)} layer(s) but {outcome}: {layers[0]}: "
        yield Diagnostic("QZ405", text + reason, row.rule.selector.place, "warning")


def of_tensor(
    tensor: PlannedTensor, config: ResolvedConfig, rules: Sequence[ConfigRule]
) -> Iterator[Diagnostic]:
    """Yield findings about a merged spec. `rules` set its fields and are sorted weakest
    first.
    """
    yield from _conflicting(tensor, config, rules)
    if tensor.spec.dtype != "int":
        # Rules may set fields of integers, and inherit another dtype from a weaker rule
        role = base_role(tensor.role)
        yield from refused_under_float([rule.fields.get(role, {}) for rule in rules])


def _conflicting(
    tensor: PlannedTensor, config: ResolvedConfig, rules: Sequence[ConfigRule]
) -> Iterator[Diagnostic]:
    """Yield findings about fields of a merged spec that conflict.

    Conflicts between built-in defaults alone are left out. A finding is at the value that was
    set by the strongest rule, because that is the one to change.

    Args:
        tensor: has the merged spec.
        config: of the file.
        rules: that set fields of the spec, weakest first.
    """
    role = base_role(tensor.role)
    strengths: dict[Place | None, int] = {}
    for strength, rule in enumerate(rules):
        for sourced in rule.fields.get(role, {}).values():
            strengths.setdefault(sourced.place, strength)
    for conflict in conflicts(tensor.spec, role, config.settings.target_device, config.form):
        places = []
        for name in conflict.fields:
            place = tensor.place_of(name)
            if place and place not in places:
                places.append(place)
        places.sort(key=lambda place: -strengths.get(place, 0))
        if places:
            yield conflict.at(places, where=f" ({role} of {tensor.layer})")
