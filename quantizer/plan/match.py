"""Which layers a selector finds, and the closest names when it finds none; reporting that is
the caller's.
"""

import dataclasses
import difflib
import fnmatch
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from quantizer.config.model import ConfigRule, Role, Selector
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.module_names import call_paths, module_of
from quantizer.graph.names import around
from quantizer.plan.model import RuleMatch

# Weakest first: a rule of a higher rank wins, field by field.
RANKS = ("all", "weighted", "type", "pattern", "path", "name", "exclude")

KINDS: Mapping[str, Callable[[Graph], list[str]]] = {
    "kind:embedding": lambda graph: [node.name for node in graph.nodes if node.row.looks_up],
    "kind:head": lambda graph: [node.name for node in graph.nodes if node.is_multiplying][-1:],
}
"""What can be said of any model, so that a model without such layers is no error. The head is
the last layer that multiplies.
"""

# The word of other frameworks, which the documentation of the form uses, too
_OTHER_WORDS = {"dense": "Linear"}


@dataclass(frozen=True)
class Match:
    """The layers a selector finds, how specific it is, and a `note` when it was not taken
    literally.
    """

    layers: tuple[str, ...]
    rank: int
    note: str | None = None
    absorbed: tuple[str, ...] = ()


@dataclass
class MatchedRule:
    """A rule with what its selector finds; `effects` counts the tensors that it sets something
    for.
    """

    rule: ConfigRule
    found: Match
    effects: int = 0

    def speaks_of(self, role: Role) -> bool:
        """Whether it says anything about a role."""
        return (
            role in (self.rule.roles or ())
            or role in self.rule.adds
            or bool(self.rule.fields.get(role))
        )

    def quantizes(self, role: Role, before: bool) -> bool:
        """Whether the role is quantized after the rule, which may not say."""
        return (
            before if self.rule.roles is None else role in self.rule.roles
        ) or role in self.rule.adds

    def summary(self) -> RuleMatch:
        """For the plan."""
        selector = self.rule.selector
        shown = selector.text or selector.kind
        return RuleMatch(
            self.rule.label, shown, self.found.layers, self.effects, str(selector.place or "")
        )


def match(selector: Selector, graph: Graph, original: Graph) -> Match:
    """The layers of `graph` that `selector` means; `original` is the graph as traced, before
    layers were folded away.

    A folded layer stands for the layer it went into when it is named, not when its type is.
    """
    if selector.kind == "all":
        return Match(tuple(graph.by_name), RANKS.index("all"))
    if selector.kind == "weighted":
        return Match(
            tuple(node.name for node in graph.nodes if is_weighted(node)),
            RANKS.index("weighted"),
        )
    if selector.kind == "type":
        return _by_type(selector.text, graph, original)
    found_by_name = _by_name(selector.text, graph, original)
    if selector.kind == "exclude":
        return dataclasses.replace(found_by_name, rank=RANKS.index("exclude"))
    return found_by_name


def is_weighted(node: Node) -> bool:
    """Whether the node is a module such as Linear, with weights of its own; not a trained
    tensor in an expression.
    """
    return (
        node.row.weight and bool(node.params) and node.op not in ("parameter", "channel_scale")
    )


def type_names(node: Node) -> frozenset[str]:
    """All words that select the node by type: operator, torch's names for it, its modules'
    classes.
    """
    names = {node.op, *node.row.types, *node.classes}
    short = {name.rpartition(".")[2] for name in names}
    return frozenset(
        names
        | short
        | {f"nn.{n.rpartition('.')[2]}" for n in names if n.startswith("torch.nn.")}
    )


def _by_type(text: str, graph: Graph, original: Graph) -> Match:
    """Layers of a type; other tools' words for torch's types are read as those, and so is
    another case.

    Layers of experts have the names of their tensors, which no module of the traced graph has
    run.
    """
    experts = {node.name: node for node in graph.nodes if node.row.experts}
    nodes = [*(node for node in original.nodes if node.name not in experts), *experts.values()]
    found = [node.name for node in nodes if text in type_names(node)]
    note = None
    if not found:
        word = _OTHER_WORDS.get(text.casefold(), text)
        known = {
            name.casefold(): name
            for node in nodes
            for name in sorted(type_names(node), reverse=True)
        }
        meant = known.get(word.casefold(), "")
        found = [node.name for node in nodes if meant in type_names(node)]
        note = f"{text!r} is read as {meant!r}" if found else None
    kept = tuple(name for name in found if name in graph.by_name)
    return Match(
        kept,
        RANKS.index("type"),
        note,
        absorbed=tuple(name for name in found if name not in graph.by_name),
    )


def closest(selector: Selector, original: Graph) -> list[str]:
    """Up to three names close to a selector that found nothing."""
    if selector.kind == "type":
        known = {
            name
            for node in original.nodes
            for name in (*node.row.types, *node.classes, node.op)
        }
        short = {name.rpartition(".")[2]: name for name in known}
        near = difflib.get_close_matches(selector.text.rpartition(".")[2], short, 3, 0.5)
        return [short[name] for name in near]
    layers = [node for node in original.nodes if node.op not in ("module", "module_input")]
    known = (
        {node.name for node in layers}
        | {node.scope for node in layers if node.scope}
        | {*KINDS}
    )
    scope = selector.text.rpartition("/")[0]
    same_scope = [
        node.name for node in layers if scope and node.name.rpartition("/")[0] == scope
    ]
    return (same_scope + difflib.get_close_matches(selector.text, sorted(known), 3, 0.5))[:3]


def advice(selector: Selector, original: Graph) -> str:
    """What to do about a selector that found nothing."""
    near = closest(selector, original)
    return (
        f"closest: {', '.join(near)}"
        if near
        else "`quantizer inspect --top all` lists all layers"
    )


def _by_name(text: str, graph: Graph, original: Graph) -> Match:
    """Exact name, then a kind, the same scope with another last part, a module path, its
    operator, `re:`, a glob.
    """
    if text in original.by_name:
        return _survivors([text], "name", graph)
    if text in KINDS:
        return Match(tuple(KINDS[text](graph)), RANKS.index("pattern"))
    scope = text.rpartition("/")[0]
    siblings = (
        [name for name in original.by_name if name.rpartition("/")[0] == scope]
        if "::" in text
        else []
    )
    if len(siblings) == 1:
        note = f"{text!r} is read as {siblings[0]!r}, the only layer of that module"
        return _survivors(siblings, "name", graph, note)
    inside = [
        node.name
        for node in original.nodes
        if node.scope == text or node.scope.startswith(f"{text}.")
    ]
    if inside and not text.startswith("re:"):
        return _survivors(inside, "path", graph)
    called = [
        n.name
        for n in original.nodes
        if text in call_paths(n.name, module_of(original, n.name))
    ]
    if called:
        return _survivors(called, "name", graph)
    patterns = _patterns(text)
    if patterns is None:
        return Match((), RANKS.index("name"))
    names, paths = (pattern.fullmatch for pattern in patterns)
    with _in_time(text):
        found = [
            node.name
            for node in original.nodes
            if names(node.name) or any(map(paths, _around(node, graph)))
        ]
    return _survivors(found, "pattern", graph)


def _around(node: Node, graph: Graph) -> list[str]:
    """The paths of the modules around a node of the traced graph; the tensors of experts have
    paths of their own.
    """
    now = graph.by_name.get(node.name, node)
    return [*around(now.scope), *(node.params.values() if now.row.experts else ())]


@contextmanager
def _in_time(text: str) -> Iterator[None]:
    """Refuse a regular expression that tries too many ways to match a name: some take longer
    than a universe lasts.

    Python has no limit for that; a signal ends it, which only the main thread has.

    Raises:
        UsageError: it takes too long.
    """
    if not text.startswith("re:") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        remedy = "repeat nothing inside of what is repeated"
        raise UsageError(
            f"the pattern {text!r} takes more than {MATCHING_S} s to match names of layers",
            help=remedy,
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MATCHING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


MATCHING_S = 2


def _patterns(text: str) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """For layer names and for module paths, the regular expressions of `re:…` or of a glob.

    Layer names have brackets, so there they stand for themselves, and `[[]`, as shells want
    them, for one; in a module path `[0-3]` is a set, as in a shell.
    """
    if text.startswith("re:"):
        try:
            return (re.compile(text[3:]),) * 2
        except re.error:
            return None
    if not any(sign in text for sign in "*?["):
        return None
    literal = re.escape(text.replace("[[]", "[")).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(literal), re.compile(fnmatch.translate(text))


def _survivors(names: list[str], rank: str, graph: Graph, note: str | None = None) -> Match:
    """The layers the found ones live in now; a layer that was folded counts as the one that
    took it.
    """
    alive = []
    for name in names:
        while name in graph.absorbed:
            name = graph.absorbed[name]
        alive.append(name)
    gone = tuple(name for name in names if name in graph.absorbed)
    return Match(tuple(dict.fromkeys(alive)), RANKS.index(rank), note, gone)
