"""Tables of a graph's structure: its blocks, the layers that read one value, and where factors
go.
"""

from collections import Counter
from collections.abc import Iterator

from quantizer.graph.ir import Graph
from quantizer.graph.module_names import module_of, path_names
from quantizer.graph.structure import InputGroup, Structure
from quantizer.report.view import Listing, View

_TITLES = ("layers that read one value", "channels", "factors are folded into")


def structure_tables(graph: Graph, structure: Structure) -> Iterator[Listing | str]:
    """The blocks, the groups of each kind of block once, and those outside; names are relative
    to a block.
    """
    rows = {
        number: tuple(
            _row(graph, group, block.path)
            for group in structure.groups
            if group.block == number
        )
        for number, block in enumerate(structure.blocks)
    }
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for number, block in enumerate(structure.blocks):
        alike.setdefault(rows[number], []).append(block.path)
    for kind, paths in alike.items():
        several = f"{len(paths)}, {paths[0]} to {paths[-1]}, all alike"
        yield f"blocks: {several if len(paths) > 1 else paths[0]}"
        yield Listing(_TITLES, kind, frozenset(_TITLES[1:2]))
    outside = [_row(graph, group, "") for group in structure.groups if group.block is None]
    if outside:
        yield "in no block:" if structure.blocks else "no blocks:"
        yield Listing(_TITLES, outside, frozenset(_TITLES[1:2]))
    kinds = Counter(
        "none" if group.fold is None else group.fold.kind for group in structure.groups
    )
    layers = sum(len(group.layers) for group in structure.groups)
    yield (
        f"{layers} layers read {len(structure.groups)} values; factors fold into a "
        f"normalization for {kinds['norm']}, into the layer before for {kinds['layer']}, into "
        f"neither for {kinds['none']}"
    )


def _row(graph: Graph, group: InputGroup, block: str) -> tuple[str, ...]:
    layers = dict.fromkeys(_relative(module_of(graph, layer), block) for layer in group.layers)
    return (", ".join(layers), str(group.channels), _where(graph, group, block))


def _where(graph: Graph, group: InputGroup, block: str) -> str:
    """The module whose parameters take the factors, or why none can."""
    if group.fold is None:
        names = {name: _relative(path, block) for name, path in path_names(graph).items()}
        return f"none: {View(names).text(group.why_not)}"
    fold = group.fold
    parts = [_relative(module_of(graph, fold.node), block)]
    if fold.channels is not None:
        count = len(set(fold.channels))
        shared = (
            "each is read several times"
            if count < len(fold.channels)
            else "not in this order or not all"
        )
        parts.append(f"{count} of its channels, {shared}")
    if fold.extra:
        parts.append(
            "also changes "
            + ", ".join(_relative(module_of(graph, name), block) for name in fold.extra)
        )
    return "; ".join(parts)


def _relative(path: str, block: str) -> str:
    return path.removeprefix(f"{block}.") if block else path
