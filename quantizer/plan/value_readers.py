"""Find what reads a node's values, directly or through moves and joins."""

from collections.abc import Iterator, Mapping

from quantizer.graph.ir import Graph
from quantizer.plan.floating import MASK
from quantizer.plan.sentinels import chooses

Reading = tuple[str, str]
"""A reader, "" for the network's output, and the node that it reads."""


def values_readers(graph: Graph, name: str, floats: Mapping[str, str]) -> Iterator[Reading]:
    """Yield what reads a node's values, directly or through moves.

    Sentinels end at a choice among values, so there a choice is a reader.
    """
    for reader in graph.consumers[name]:
        if not reader:
            yield reader, name
            continue
        node = graph.by_name[reader]
        ends_sentinels = floats.get(name) == MASK and chooses(node)
        if node.row.kind == "passthrough" and not ends_sentinels:
            yield from values_readers(graph, reader, floats)
        else:
            yield reader, name


def outer_readers(
    graph: Graph, name: str, floats: Mapping[str, str] | None = None
) -> Iterator[Reading]:
    """Yield what reads a node's values, directly or through moves and joins.

    Args:
        floats: of the layout. With it sentinels end at a choice.
    """
    pending = [name]
    joins = {name}
    while pending:
        for reader, source in values_readers(graph, pending.pop(), floats or {}):
            if not reader or not graph.by_name[reader].is_join:
                yield reader, source
            elif reader not in joins:
                joins.add(reader)
                pending.append(reader)
