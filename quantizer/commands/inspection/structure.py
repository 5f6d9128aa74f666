"""Make tables of the structure of a graph: its blocks, the layers that read the same value, and
where factors can be folded into.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from quantizer.graph.ir import Graph
from quantizer.graph.names import module_of, path_names
from quantizer.graph.structure import InputGroup, Structure
from quantizer.report.view import Listing, TableRow, TableView

_TITLES = ("layers that read one value", "channels", "factors are folded into")


def structure_tables(graph: Graph, structure: Structure) -> Iterator[Listing | str]:
    """Yield tables and lines about the groups of layers that read the same value.

    Blocks with the same groups are shown once, with names relative to the block. Groups outside
    of blocks follow.
    """
    paths_by_rows: dict[tuple[TableRow, ...], list[str]] = {}
    for number, block in enumerate(structure.blocks):
        path = block.path
        rows = _rows(graph, structure, number, path)
        paths_by_rows.setdefault(rows, []).append(path)
    for rows, paths in paths_by_rows.items():
        blocks = paths[0]
        if len(paths) > 1:
            blocks = f"{len(paths)}, {paths[0]} to {paths[-1]}, all alike"
        yield f"blocks: {blocks}"
        yield _listing(rows)
    outside = _rows(graph, structure, None, "")
    if outside:
        yield "in no block:" if structure.blocks else "no blocks:"
        yield _listing(outside)
    folds: Counter[str] = Counter()
    layers = 0
    for group in structure.groups:
        kind = "none" if group.fold is None else group.fold.kind
        folds[kind] += 1
        layers += len(group.layers)
    yield (
        f"{layers} layers read {len(structure.groups)} values; factors fold into a "
        f"normalization for {folds['norm']}, into the layer before for {folds['layer']}, into "
        f"neither for {folds['none']}"
    )


def _listing(rows: tuple[TableRow, ...]) -> Listing:
    return Listing(_TITLES, rows, numbers=frozenset({"channels"}))


def _rows(
    graph: Graph, structure: Structure, number: int | None, path: str
) -> tuple[TableRow, ...]:
    """Return the groups of one block, or those outside of blocks."""
    rows = []
    for group in structure.groups:
        if group.block != number:
            continue
        layers = _module_paths(graph, group.layers, path)
        names = ", ".join(dict.fromkeys(layers))
        target = _target(graph, group, path)
        rows.append((names, str(group.channels), target))
    return tuple(rows)


def _target(graph: Graph, group: InputGroup, block: str) -> str:
    """Return the module whose parameters take the factors, or why none can."""
    fold = group.fold
    if fold is None:
        names = {}
        for name, path in path_names(graph).items():
            names[name] = _relative(path, block)
        reason = TableView(names).text(group.why_not)
        return f"none: {reason}"
    parts = _module_paths(graph, [fold.node], block)
    if fold.channels is not None:
        count = len(set(fold.channels))
        order = "not in this order or not all"
        if count < len(fold.channels):
            order = "each is read several times"
        parts.append(f"{count} of its channels, {order}")
    if fold.extra:
        others = _module_paths(graph, fold.extra, block)
        parts.append(f"also changes {', '.join(others)}")
    return "; ".join(parts)


def _module_paths(graph: Graph, names: Iterable[str], block: str) -> list[str]:
    """Return the module paths of some layers, relative to a block."""
    paths = []
    for name in names:
        path = module_of(graph, name)
        paths.append(_relative(path, block))
    return paths


def _relative(path: str, block: str) -> str:
    return path.removeprefix(f"{block}.") if block else path
