"""What is wrong with a config once it meets a model: findings only, each at the place in the file that causes it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from quantizer.config.check_layered import inherits_float, refused_under_float
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.model import Config, ConfigRule, QuantizationSpec, Role, Sourced
from quantizer.config.rules import conflicts
from quantizer.graph.ir import Graph
from quantizer.plan.match import KINDS, RANKS, Match, advice
from quantizer.plan.model import Key

_KEYS = {
    ("layered", "type"): "layer_type",
    ("layered", "name"): "layer_name",
    ("hierarchical", "type"): "layer_type_quant_config",
    ("hierarchical", "name"): "layer_quant_config",
    ("hierarchical", "exclude"): "exclude",
}
"""What the file calls a selector."""


def unmatched(config: Config, matches: Sequence[Match], original: Graph) -> Iterator[Diagnostic]:
    """A selector that finds nothing is an error, with the closest names; one that was not taken literally is a note."""
    for rule, found in zip(config.rules, matches, strict=True):
        selector = rule.selector
        if found.note:
            yield Diagnostic("QZ404", found.note, selector.place, "note")
        if found.layers or selector.kind == "all" or not selector.required or selector.text in KINDS:
            continue
        if selector.kind == "weighted":
            text = f"{rule.label} applies to no layer: {original.model} has none with weights of its own"
            yield Diagnostic("QZ402", text, selector.place, help="`quantizer inspect --top all` lists all layers")
            continue
        if found.absorbed:
            text = f"all {len(found.absorbed)} layers of type {selector.text!r} are folded into the layers before them"
            help_ = "select those layers instead, by type or by name"
        else:
            text = f"{_KEYS[config.form, selector.kind]} {selector.text!r} matches no layer"
            help_ = advice(selector, original)
        yield Diagnostic("QZ402", text, selector.place, help=help_)


def overridden(config: Config, matches: Sequence[Match]) -> Iterator[Diagnostic]:
    """Two equally specific rules for one layer: the later one wins, which is reported once."""
    owner: dict[tuple[int, str], int] = {}
    for index, (rule, found) in enumerate(zip(config.rules, matches, strict=True)):
        layers = found.layers if found.rank else ()
        earlier = {owner[found.rank, layer] for layer in layers if (found.rank, layer) in owner}
        owner |= {(found.rank, layer): index for layer in layers}
        for other in sorted(earlier):
            if config.rules[other].fields != rule.fields:
                text = f"{rule.label} overrides {config.rules[other].label}: both select by {RANKS[found.rank]}"
                yield Diagnostic("QZ403", text, rule.selector.place, "warning")


def embeddings(config: Config, matches: Sequence[Match], graph: Graph, planned: Container[Key]) -> Iterator[Diagnostic]:
    """A note on embeddings that only the global block reaches: other tools leave them float."""
    everywhere = [rule for rule in config.rules if rule.selector.kind == "weighted" and rule.fields.get("weights")]
    told = {
        layer
        for rule, found in zip(config.rules, matches, strict=True)
        if RANKS.index("weighted") < found.rank and rule.fields.get("weights")
        for layer in found.layers
    }
    names = [node.name for node in graph.nodes if node.row.looks_up and (node.name, "weights") in planned]
    reached = [name for name in names if name not in told]
    if everywhere and reached:
        text = f"{everywhere[0].label} also quantizes the weights of embeddings: {', '.join(reached)}"
        help_ = "add them to exclude to leave them in float, or give them an entry in layer_quant_config"
        yield Diagnostic("QZ409", text, everywhere[0].selector.place, "note", help=help_)


def ineffective(
    config: Config, matches: Sequence[Match], effects: Sequence[int], floats: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """A rule that matches layers but sets nothing is most likely a misunderstanding."""
    for rule, found, count in zip(config.rules, matches, effects, strict=True):
        if found.layers and not count and rule.selector.kind != "all":
            why = floats.get(found.layers[0], "the layer has no tensor of the listed kinds")
            idle = "there is nothing to quantize" if rule.selector.kind == "exclude" else "changes no tensor"
            text = f"{rule.label} matches {len(found.layers)} layer(s) but {idle}: {found.layers[0]}: {why}"
            yield Diagnostic("QZ405", text, rule.selector.place, "warning")


def conflicting(
    layer: str,
    role: Role,
    spec: QuantizationSpec,
    sources: Mapping[str, Sourced],
    config: Config,
    rules: Sequence[ConfigRule],
) -> Iterator[Diagnostic]:
    """The rule book on a merged spec, for values that a file set: the built-in default is exempt.

    `rules`, weakest first, say how strong each value is: the strongest in conflict is the one to change.
    """
    order: dict[Place | None, int] = {}
    for strength, rule in enumerate(rules):
        for sourced in rule.fields.get(role, {}).values():
            order.setdefault(sourced.place, strength)
    for conflict in conflicts(spec, role, config.settings.target_device, config.form):
        places = [sources[name].place for name in conflict.fields if name in sources]
        known = sorted(dict.fromkeys(filter(None, places)), key=lambda place: -order.get(place, 0))
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


def under_float(role: Role, spec: QuantizationSpec, rules: Sequence[ConfigRule]) -> Iterator[Diagnostic]:
    """Integer values of a rule that inherits a floating-point datatype from a weaker one; `rules` are weakest first."""
    if spec.dtype != "int":
        blocks = [rule.fields.get(role, {}) for rule in rules]
        yield from filter(None, (refused_under_float(*inherited) for inherited in inherits_float(blocks)))
