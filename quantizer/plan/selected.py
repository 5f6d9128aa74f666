"""The layers that a selector names, also by type, kind, glob or regular expression, and the
closest if it names none.
"""

import difflib
import fnmatch
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from quantizer.config.forms.form import Form
from quantizer.config.model import Selector
from quantizer.errors import QuantizerError, UsageError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import around, call_paths, is_operator_name, module_of
from quantizer.graph.structure.transformer_parts import (
    cached_values,
    language_head,
    media_layers,
    router_layers,
    wide_layers,
)
from quantizer.plan.model import RANKS, Key, Match
from quantizer.plugins import if_command

SELECTED_KINDS: Mapping[str, Callable[[Graph], list[str]]] = {
    "kind:embedding": lambda graph: [node.name for node in graph.nodes if node.row.looks_up],
    "kind:head": lambda graph: [node.name for node in graph.nodes if node.is_multiplying][-1:],
    "kind:lm_head": language_head,
    "kind:router": router_layers,
    "kind:vision": media_layers,
    "kind:more_bits": wide_layers,
}
"""Selectors that fit any model, so that a model without such layers is valid. The head is
the last layer that multiplies.
"""


_KEYS = {
    ("type", "layered"): "layer_type",
    ("name", "layered"): "layer_name",
    ("type", "hierarchical"): "layer_type_quant_config",
    ("name", "hierarchical"): "layer_quant_config",
    ("cache", "hierarchical"): "kv_cache_quant_config",
    ("cache_source", "hierarchical"): "kv_cache_quant_config",
}
"""The keys of selectors in a file. Both forms have `exclude` for the other ones."""


# The word of other frameworks, and of the documentation of the hierarchical form
_OTHER_WORDS = {"dense": "Linear"}

MATCHING_S = 2
"""The time limit for a regular expression."""


def key_of(selector: Selector, form: Form) -> str:
    """Return the key under which a file of a form has a selector."""
    return _KEYS.get((selector.kind, form), "exclude")


def attentions(named: Match, graph: Graph) -> Match:
    """Return the attentions that are named, or that read the outputs of named layers."""
    layers_named = set(named.layers)
    keys: list[Key] = []
    for cached in cached_values(graph):
        if cached.layer in layers_named or not layers_named.isdisjoint(cached.sources):
            keys.append((cached.layer, cached.role))
    layers = tuple(dict.fromkeys(layer for layer, _ in keys))
    return replace(named, layers=layers, keys=tuple(keys), named=named.layers)


def type_names(node: Node) -> frozenset[str]:
    """Return all words that select the node by type: its operator, torch's names for that, and
    the classes of its modules.
    """
    names: set[str] = set()
    for name in (node.op, *node.row.types, *node.classes):
        names |= {name, _short(name)}
        if name.startswith("torch.nn."):
            names.add(f"nn.{_short(name)}")
    return frozenset(names)


def _short(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def by_type(text: str, graph: Graph, original: Graph) -> Match:
    """Return the layers of a type. Words of other tools are translated to torch's, and case may
    differ.

    Layers of experts are those of `graph`, where a pass has made them of traced operators.
    """
    experts = {node.name: node for node in graph.nodes if node.row.experts}
    nodes = [*(node for node in original.nodes if node.name not in experts), *experts.values()]
    names = [node.name for node in nodes if text in type_names(node)]
    note = None
    if not names:
        known: dict[str, str] = {}
        for node in nodes:
            for name in sorted(type_names(node), reverse=True):
                known[name.casefold()] = name
        word = _OTHER_WORDS.get(text.casefold(), text)
        meant = known.get(word.casefold(), "")
        names = [node.name for node in nodes if meant in type_names(node)]
        if names:
            note = f"{text!r} is read as {meant!r}"
    layers: list[str] = []
    absorbed: list[str] = []
    for name in names:
        if name in graph.by_name:
            layers.append(name)
        else:
            absorbed.append(name)
    rank = RANKS.index("type")
    return Match(tuple(layers), rank, note, tuple(absorbed))


def closest_layers(selector: Selector, original: Graph) -> list[str]:
    """Return up to three names close to a selector that matches nothing."""
    if selector.kind == "type":
        types: dict[str, str] = {}
        for node in original.nodes:
            for name in (*node.row.types, *node.classes, node.op):
                types[_short(name)] = name
        near = difflib.get_close_matches(_short(selector.text), types, 3, 0.5)
        return [types[name] for name in near]
    scope = _scope(selector.text)
    known = {*SELECTED_KINDS}
    same_scope = []
    for node in original.nodes:
        if node.op in ("module", "module_input"):
            continue
        known.add(node.name)
        if node.scope:
            known.add(node.scope)
        if scope and _scope(node.name) == scope:
            same_scope.append(node.name)
    near = difflib.get_close_matches(selector.text, sorted(known), 3, 0.5)
    ends = [name for name in sorted(known) if name.endswith(f".{selector.text}")]
    distinct = dict.fromkeys(ends + same_scope + near)
    return list(distinct)[:3]


def _scope(name: str) -> str:
    """Return the module of a layer's name."""
    return name.rpartition("/")[0]


def how_to_list_layers() -> str:
    """Return a remedy for a word that stands for no layer."""
    words = "`quantizer inspect --model MODEL --top all` lists all layers"
    return if_command("inspect", words)


def advice(selector: Selector, original: Graph) -> str:
    """Return a remedy for a selector that matches nothing."""
    as_expression = f"re:{selector.text}"
    if selector.kind != "type" and _matches(as_expression, original):
        return f"{selector.text!r} is a glob; as a regular expression it is {as_expression!r}"
    near = closest_layers(selector, original)
    if near:
        return f"closest: {', '.join(near)}"
    return how_to_list_layers()


def _matches(text: str, original: Graph) -> bool:
    """Return whether a text names layers; False if it takes too long."""
    try:
        return bool(by_name(text, original, original).layers)
    except UsageError:
        return False


def by_name(text: str, graph: Graph, original: Graph) -> Match:
    """Return the layers that `text` names.

    It is an exact name, a kind, a name whose scope has one layer, a module path, a path of the
    operator, `re:…` or a glob. The first that matches counts.
    """
    if text in original.by_name:
        return _survivors([text], "name", graph)
    if text in SELECTED_KINDS:
        selected = SELECTED_KINDS[text](graph)
        return Match(tuple(selected), RANKS.index("pattern"))
    if is_operator_name(text):
        siblings = [name for name in original.by_name if _scope(name) == _scope(text)]
        if len(siblings) == 1:
            note = f"{text!r} is read as {siblings[0]!r}, the only layer of that module"
            return _survivors(siblings, "name", graph, note)
    inside = []
    called = []
    for node in original.nodes:
        if node.scope == text or node.scope.startswith(f"{text}."):
            inside.append(node.name)
        if text in call_paths(node.name, module_of(original, node.name)):
            called.append(node.name)
    if inside and not text.startswith("re:"):
        return _survivors(inside, "path", graph)
    if called:
        return _survivors(called, "name", graph)
    patterns = _patterns(text)
    if patterns is None:
        return Match((), RANKS.index("name"))
    name_pattern, path_pattern = patterns
    names = []
    with matching_limit(text, UsageError):
        for node in original.nodes:
            paths = map(path_pattern.fullmatch, _paths_around(node, graph))
            if name_pattern.fullmatch(node.name) or any(paths):
                names.append(node.name)
    return _survivors(names, "pattern", graph)


def _paths_around(node: Node, graph: Graph) -> list[str]:
    """Return the paths of the modules around a node of the traced graph. The tensors of experts
    have paths of their own.
    """
    current = graph.by_name.get(node.name, node)
    paths = [*around(current.scope)]
    if current.row.experts:
        paths.extend(node.params.values())
    return paths


def _patterns(text: str) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """Return the regular expressions of `re:…` or of a glob for layer names and for module
    paths, or None if it is neither.

    In a layer name a bracket is literal. In a module path `[0-3]` is a set, as in a shell.
    """
    if text.startswith("re:"):
        try:
            pattern = re.compile(text[3:])
        except re.error:
            return None
        return pattern, pattern
    if not any(sign in text for sign in "*?["):
        return None
    return glob_of_names(text), re.compile(fnmatch.translate(text))


def _survivors(names: list[str], rank: str, graph: Graph, note: str | None = None) -> Match:
    """Return the match of named layers. A folded layer counts as the one that it was folded
    into.
    """
    alive: dict[str, None] = {}
    for name in names:
        while name in graph.absorbed:
            name = graph.absorbed[name]
        # An operator that only moved a weight was removed, and no layer took its place
        if name in graph.by_name:
            alive[name] = None
    absorbed = tuple(name for name in names if name in graph.absorbed)
    return Match(tuple(alive), RANKS.index(rank), note, absorbed)


def glob_of_names(text: str) -> re.Pattern[str]:
    """Return the regular expression of a glob for layer names.

    Layer names have brackets, so a bracket is literal, and so is `[[]`, as shells write it.

    >>> bool(glob_of_names("*Linear[f?]*").fullmatch("Net::Net/Linear[fc]/linear"))
    True
    """
    literal = text.replace("[[]", "[").replace("[", "[[]")
    # It backtracks into no earlier star, so any number of stars is fast
    return re.compile(fnmatch.translate(literal))


@contextmanager
def matching_limit(text: str, error: type[QuantizerError]) -> Iterator[None]:
    """Stop a regular expression that backtracks for too long inside the `with` block.

    Python has no limit for that. A signal stops it, which only the main thread can receive, and
    which Windows lacks. Elsewhere the time is checked at the end.

    Args:
        text: the pattern.
        error: the class of errors to raise.

    Raises:
        error: it takes too long.
    """
    failure = error(
        f"the pattern {text!r:.200} takes more than {MATCHING_S} s to match names of layers",
        help="use no repetition inside another one, such as (a+)+",
    )
    start = time.monotonic()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        if time.monotonic() - start > MATCHING_S:
            raise failure
        return

    def stop(*_: object) -> None:
        raise failure

    handler = signal.signal(signal.SIGALRM, stop)
    # The user's code may have set a timer of its own
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, MATCHING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            remaining = max(remaining - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
