"""Plan the key-value cache: which rule holds for the keys and values of each attention, and
which layers a config names in vain.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.wording import first_names
from quantizer.graph.ir import Graph
from quantizer.graph.structure.transformer_parts import cached_values
from quantizer.plan.axes import TensorView
from quantizer.plan.layout import Group
from quantizer.plan.match import MatchedRule
from quantizer.plan.model import Key

_RANK_WITH_HEADS = 4
"""Keys and values are [batch, heads, tokens, features]."""
_HEADS = 1


@dataclass(frozen=True)
class PlannedValue:
    """The keys or values of an attention that a rule quantizes.

    Attributes:
        group: the node that computes them, and the operator that multiplies them.
        view: their axes.
        rule: the strongest one about them.
    """

    group: Group
    view: TensorView
    rule: MatchedRule


def planned_values(rules: Sequence[MatchedRule], graph: Graph) -> dict[Key, PlannedValue]:
    """Return the keys and values that rules select, by layer and role."""
    strongest: dict[Key, MatchedRule] = {}
    for row in sorted(rules, key=lambda row: row.match.rank):
        strongest.update(dict.fromkeys(row.match.keys, row))
    if not strongest:
        return {}
    planned: dict[Key, PlannedValue] = {}
    for cached in cached_values(graph):
        key = (cached.layer, cached.role)
        if key in strongest:
            sizes = graph.by_name[cached.value].shape
            view = TensorView(sizes, channels=_HEADS, features=cached.features)
            group = Group(cached.value, (cached.layer,))
            planned[key] = PlannedValue(group, view, strongest[key])
    return planned


def cache_findings(
    rules: Sequence[MatchedRule], graph: Graph, planned: Iterable[PlannedValue]
) -> Iterator[Diagnostic]:
    """Yield findings on the key-value cache: layers that compute none of it, and scales of
    heads that have no axis.
    """
    yield from _uncached(rules, graph)
    yield from _without_heads(planned)


def _without_heads(planned: Iterable[PlannedValue]) -> Iterator[Diagnostic]:
    """Yield an error for each rule that asks for scales of heads where heads have no axis."""
    reported: set[str] = set()
    for value in planned:
        rule = value.rule.rule
        qscheme = rule.fields["input"]["qscheme"]
        if qscheme.value != "per_channel" or value.view.rank == _RANK_WITH_HEADS:
            continue
        if rule.label not in reported:
            reported.add(rule.label)
            yield Diagnostic(
                "QZ406",
                f"the heads of {value.group.members[0]} are in one axis with the batch, and "
                "cannot have a scale each",
                qscheme.place,
                help="set qscheme to per_tensor",
            )


def _uncached(rules: Sequence[MatchedRule], graph: Graph) -> Iterator[Diagnostic]:
    """Yield an error for each rule that names no layer whose output is cached. Yield a warning
    if that is so for some of its layers, which have the names of others.
    """
    for row in rules:
        named = row.match.named
        if not named:
            continue
        sources: set[str] = set()
        attentions: set[str] = set()
        for cached in cached_values(graph):
            sources.update(cached.sources)
            attentions.add(cached.layer)
        hits = [name for name in named if name in sources]
        if not hits and attentions.isdisjoint(named):
            yield _none_cached(row, graph)
            continue
        missed = _missed_paths(graph, named, hits)
        if missed:
            yield Diagnostic(
                "QZ410",
                f"{row.rule.label} also names {first_names(missed)}, and the trace shows no "
                "attention that reads this as keys or values",
                row.rule.selector.place,
                "warning",
                help="what these layers compute stays in float",
            )


def _missed_paths(graph: Graph, named: Sequence[str], hits: Sequence[str]) -> list[str]:
    """Return the paths of named layers whose output is not cached, though layers of the same
    name have theirs cached.
    """
    hit_paths = {graph.by_name[name].scope for name in hits}
    names = {_last_name(path) for path in hit_paths}
    missed: dict[str, None] = {}
    for name in named:
        node = graph.by_name[name]
        is_missed = node.params and node.scope not in hit_paths
        if is_missed and _last_name(node.scope) in names:
            missed[node.scope] = None
    return list(missed)


def _none_cached(row: MatchedRule, graph: Graph) -> Diagnostic:
    """Return the error for a rule whose layers compute no keys and values."""
    paths: dict[str, None] = {}
    for name in row.match.named:
        paths[graph.by_name[name].scope or name] = None
    remedy = "name the layers that compute keys and values, such as *.k_proj and *.v_proj"
    if not cached_values(graph):
        remedy = f"the trace of {graph.model} shows no attention; leave the key out"
    return Diagnostic(
        "QZ410",
        f"{row.rule.label} names {first_names(list(paths))}, and the trace shows no attention "
        "that reads this as keys or values",
        row.rule.selector.place,
        help=remedy,
    )


def _last_name(path: str) -> str:
    return path.rpartition(".")[2]
