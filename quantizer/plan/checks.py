"""What is wrong with a config once it meets a model: findings only, each at the place in the
file that causes it.
"""

from collections.abc import Container, Iterator, Mapping, Sequence

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.forms.form import Form
from quantizer.config.model import Config, ConfigRule, QuantizationSpec, Role, Sourced
from quantizer.config.rules.check_layered import inherits_float, refused_under_float
from quantizer.config.rules.spec_rules import conflicts
from quantizer.graph.ir import Graph
from quantizer.plan.match import KINDS, RANKS, MatchedRule, advice
from quantizer.plan.model import Key

_KEYS = {
    ("layered", "type"): "layer_type",
    ("layered", "name"): "layer_name",
    ("hierarchical", "type"): "layer_type_quant_config",
    ("hierarchical", "name"): "layer_quant_config",
    ("hierarchical", "exclude"): "exclude",
}
"""What the file calls a selector."""


def unmatched(
    form: Form, rules: Sequence[MatchedRule], original: Graph
) -> Iterator[Diagnostic]:
    """A selector that finds nothing is an error, with the closest names; one that was not taken
    literally is a note.
    """
    for row in rules:
        selector, found = row.rule.selector, row.found
        if found.note:
            yield Diagnostic("QZ404", found.note, selector.place, "note")
        if (
            found.layers
            or selector.kind == "all"
            or not selector.required
            or selector.text in KINDS
        ):
            continue
        if selector.kind == "weighted" and not row.rule.fields:
            continue  # an empty block says nothing
        if selector.kind == "weighted":
            text = (
                f"{row.rule.label} applies to no layer: {original.model} has none with "
                "weights of its own"
            )
            yield Diagnostic(
                "QZ402",
                text,
                selector.place,
                help="`quantizer inspect --top all` lists all layers",
            )
            continue
        if found.absorbed:
            text = (
                f"all {len(found.absorbed)} layers of type {selector.text!r} are folded into "
                "the layers before them"
            )
            help_ = "select those layers instead, by type or by name"
        else:
            text = f"{_KEYS[form, selector.kind]} {selector.text!r} matches no layer"
            help_ = advice(selector, original)
        yield Diagnostic("QZ402", text, selector.place, help=help_)


def overridden(rules: Sequence[MatchedRule]) -> Iterator[Diagnostic]:
    """Two equally specific rules for one layer: the later one wins, which is reported once."""
    owner: dict[tuple[int, str], int] = {}
    for index, row in enumerate(rules):
        keys = [(row.found.rank, layer) for layer in row.found.layers if row.found.rank]
        for other in sorted({owner[key] for key in keys if key in owner}):
            if _says_otherwise(row.rule, rules[other].rule):
                labels = f"{row.rule.label} overrides {rules[other].rule.label}"
                text = f"{labels}: both select by {RANKS[row.found.rank]}"
                yield Diagnostic("QZ403", text, row.rule.selector.place, "warning")
        owner |= dict.fromkeys(keys, index)


def _says_otherwise(rule: ConfigRule, other: ConfigRule) -> bool:
    """Whether two rules for one layer disagree: about a tensor that both are about, or about
    which are quantized.
    """
    are_about_same = (
        rule.roles is not None
        or other.roles is not None
        or rule.fields.keys() & other.fields.keys()
    )
    return bool(are_about_same) and rule.fields != other.fields


def embeddings(
    rules: Sequence[MatchedRule], graph: Graph, planned: Container[Key]
) -> Iterator[Diagnostic]:
    """A note on embeddings that only the global block reaches: other tools leave them float."""
    weights = [row for row in rules if row.rule.fields.get("weights")]
    everywhere = [row.rule for row in weights if row.rule.selector.kind == "weighted"]
    named = {
        layer
        for row in weights
        if RANKS.index("weighted") < row.found.rank
        for layer in row.found.layers
    }
    names = [
        node.name
        for node in graph.nodes
        if node.row.looks_up and (node.name, "weights") in planned
    ]
    reached = [name for name in names if name not in named]
    if everywhere and reached:
        text = (
            f"{everywhere[0].label} also quantizes the weights of embeddings: "
            f"{', '.join(reached)}"
        )
        help_ = (
            "add them to exclude to leave them in float, or give them an entry in "
            "layer_quant_config"
        )
        yield Diagnostic("QZ409", text, everywhere[0].selector.place, "note", help=help_)


def ineffective(
    rules: Sequence[MatchedRule], floats: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """A rule that matches layers but sets nothing is most likely a misunderstanding."""
    for row in rules:
        layers, selector = row.found.layers, row.rule.selector
        is_empty = selector.kind == "weighted" and not row.rule.fields
        if layers and not row.effects and selector.kind != "all" and not is_empty:
            why = floats.get(layers[0], "the layer has no tensor of the listed kinds")
            idle = (
                "there is nothing to quantize"
                if selector.kind == "exclude"
                else "changes no tensor"
            )
            text = (
                f"{row.rule.label} matches {len(layers)} layer(s) but {idle}: {layers[0]}: "
                f"{why}"
            )
            yield Diagnostic("QZ405", text, selector.place, "warning")


def conflicting(
    layer: str,
    role: Role,
    spec: QuantizationSpec,
    sources: Mapping[str, Sourced],
    config: Config,
    rules: Sequence[ConfigRule],
) -> Iterator[Diagnostic]:
    """The rule book on a merged spec, for values that a file set: the built-in default is
    exempt.

    `rules`, weakest first, say how strong each value is: the strongest in conflict is the one
    to change.
    """
    order: dict[Place | None, int] = {}
    for strength, rule in enumerate(rules):
        for sourced in rule.fields.get(role, {}).values():
            order.setdefault(sourced.place, strength)
    for conflict in conflicts(spec, role, config.settings.target_device, config.form):
        places = [sources[name].place for name in conflict.fields if name in sources]
        known = sorted(
            dict.fromkeys(filter(None, places)), key=lambda place: -order.get(place, 0)
        )
        if not known:
            continue
        yield Diagnostic(
            conflict.code,
            f"{conflict.message} ({role} of {layer})",
            known[0],
            conflict.severity,
            help=conflict.help,
            related=tuple((place, "in conflict with this") for place in known[1:]),
        )


def under_float(
    role: Role, spec: QuantizationSpec, rules: Sequence[ConfigRule]
) -> Iterator[Diagnostic]:
    """Integer values of a rule that inherits a floating-point datatype from a weaker one;
    `rules` are weakest first.
    """
    if spec.dtype != "int":
        blocks = [rule.fields.get(role, {}) for rule in rules]
        yield from filter(
            None, (refused_under_float(*inherited) for inherited in inherits_float(blocks))
        )
