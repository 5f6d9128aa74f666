"""Show a graph's structure: its blocks, the layers that read one value, where factors fold."""

from collections import Counter
from collections.abc import Iterator

from quantizer.graph.ir import Graph
from quantizer.graph.module_names import module_of, path_names
from quantizer.graph.structure import InputGroup, Structure
from quantizer.report.view import Listing, View

_TITLES = ("layers that read one value", "channels", "factors are folded into")


def structure_tables(graph: Graph, structure: Structure) -> Iterator[Listing | str]:
    """Yield the groups of each kind of block once, and those outside of blocks.

    Names are relative to a block.
    """
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for number, block in enumerate(structure.blocks):
        rows: list[tuple[str, ...]] = []
        for group in structure.groups:
            if group.block == number:
                rows.append(_row(graph, group, block.path))
        alike.setdefault(tuple(rows), []).append(block.path)
    for kind, paths in alike.items():
        blocks = paths[0]
        if len(paths) > 1:
            blocks = f"{len(paths)}, {paths[0]} to {paths[-1]}, all alike"
        yield f"blocks: {blocks}"
        yield Listing(_TITLES, kind, frozenset(_TITLES[1:2]))
    outside = [_row(graph, group, "") for group in structure.groups if group.block is None]
    if outside:
        yield "in no block:" if structure.blocks else "no blocks:"
        yield Listing(_TITLES, outside, frozenset(_TITLES[1:2]))
    kinds: Counter[str] = Counter()
    layers = 0
    for group in structure.groups:
        kind_of_fold = "none" if group.fold is None else group.fold.kind
        kinds[kind_of_fold] += 1
        layers += len(group.layers)
    yield (
        f"{layers} layers read {len(structure.groups)} values; factors fold into a "
        f"normalization for {kinds['norm']}, into the layer before for {kinds['layer']}, into "
        f"neither for {kinds['none']}"
    )


def _row(graph: Graph, group: InputGroup, block: str) -> tuple[str, ...]:
    layers = [_relative(module_of(graph, layer), block) for layer in group.layers]
    names = ", ".join(dict.fromkeys(layers))
    return names, str(group.channels), _where(graph, group, block)


def _where(graph: Graph, group: InputGroup, block: str) -> str:
    """Return the module whose parameters take the factors, or why none can."""
    fold = group.fold
    if fold is None:
        names = {name: _relative(path, block) for name, path in path_names(graph).items()}
        return f"none: {View(names).text(group.why_not)}"
    parts = [_relative(module_of(graph, fold.node), block)]
    if fold.channels is not None:
        count = len(set(fold.channels))
        shared = "not in this order or not all"
        if count < len(fold.channels):
            shared = "each is read several times"
        parts.append(f"{count} of its channels, {shared}")
    if fold.extra:
        others = [_relative(module_of(graph, name), block) for name in fold.extra]
        parts.append(f"also changes {', '.join(others)}")
    return "; ".join(parts)


def _relative(path: str, block: str) -> str:
    return path.removeprefix(f"{block}.") if block else path
