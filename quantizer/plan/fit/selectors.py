"""Find short selectors for layers: a kind, a pattern, or a path that selects these layers with
weights and no others.
"""

from collections.abc import Collection, Iterator

from quantizer.config.model import Selector
from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import call_paths, path_names
from quantizer.plan.match import has_own_weights, match
from quantizer.plan.selected import SELECTED_KINDS

_NAMED_KINDS = ("kind:embedding", "kind:head")
"""The kinds by which layers are named."""


def selectors_for(
    layers: Collection[str], graph: Graph, original: Graph, *, kinds: bool = False
) -> list[str]:
    """Return selectors that together match the layers, and no other layer with weights.

    Layers whose paths differ in numbers alone share a pattern. With `kinds`, all embeddings
    are `kind:embedding`, and the last layer is `kind:head`.

    Raises:
        ModelError: nothing that a config can say selects one of the layers alone.
    """
    wanted = set(layers)
    chosen: dict[str, set[str]] = {}
    for kind in _NAMED_KINDS if kinds else ():
        of_kind = set(SELECTED_KINDS[kind](graph))
        if of_kind and of_kind <= wanted:
            chosen[kind] = of_kind
    names = path_names(graph)
    patterns: dict[str, int] = {}
    for layer in layers:
        pattern = _pattern(names[layer])
        patterns[pattern] = patterns.get(pattern, 0) + 1
    for pattern, count in patterns.items():
        matched = _matched(pattern, graph, original)
        if count > 1 and pattern.strip(".*") and matched and matched <= wanted:
            chosen[pattern] = matched
    # A kind or pattern whose layers another one has already is not needed
    needed: list[str] = []
    covered: set[str] = set()
    for text in sorted(chosen, key=lambda text: -len(chosen[text])):
        if not chosen[text] <= covered:
            needed.append(text)
            covered |= chosen[text]
    for layer in layers:
        if layer not in covered:
            text = _name(graph.by_name[layer], names[layer], graph, original)
            needed.append(text)
            covered |= _matched(text, graph, original)
    return needed


def _pattern(path: str) -> str:
    """Return a path with a star for each number.

    >>> _pattern("layers.11.mlp.up")
    'layers.*.mlp.up'
    """
    words = ["*" if word.isdecimal() else word for word in path.split(".")]
    return ".".join(words)


def _name(node: Node, path: str, graph: Graph, original: Graph) -> str:
    """Return the shortest name that selects no other layer with weights."""
    for text in (path, *_more_names(node)):
        if _matched(text, graph, original) == {node.name}:
            return text
    raise ModelError(
        f"no name in a config selects {node.name} alone",
        help="give the module a name of its own, or write the config by hand",
    )


def _more_names(node: Node) -> Iterator[str]:
    yield from reversed(call_paths(node.name, node.scope))
    yield node.name
    yield from node.params.values()


def _matched(text: str, graph: Graph, original: Graph) -> set[str]:
    """Return the layers with weights that a selector matches."""
    found_match = match(Selector("name", text), graph, original)
    layers = set()
    for name in found_match.layers:
        if name in graph.by_name and has_own_weights(graph.by_name[name]):
            layers.add(name)
    return layers
