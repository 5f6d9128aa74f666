"""Find what reads a node's values, directly or through moves and joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quantizer.graph.ir import Graph
from quantizer.plan.floating import MASK
from quantizer.plan.sentinels import chooses


def values_readers(
    graph: Graph, name: str, floats: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the `readers` of a node's values; of values with sentinels, which do not outlive
    it, a choice is one.
    """
    for reader in graph.consumers[name]:
        is_moved = reader and graph.by_name[reader].row.kind == "passthrough"
        if is_moved and not (floats.get(name) == MASK and chooses(graph.by_name[reader])):
            yield from values_readers(graph, reader, floats)
        else:
            yield reader, name


def outer_readers(
    graph: Graph, name: str, floats: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (reader, what it reads) of a node's values, directly or through moves and joins; ""
    is the output.

    Args:
        floats: of the layout; where it is given, sentinels end at a choice.
    """
    pending, joins = [name], {name}
    while pending:
        for reader, read in values_readers(graph, pending.pop(), floats or {}):
            if not reader or not graph.by_name[reader].is_join:
                yield reader, read
            elif reader not in joins:
                joins.add(reader)
                pending.append(reader)
