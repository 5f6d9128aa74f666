"""Predicts the memory of algorithms, for `memory_prediction`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from quantizer.config.algorithms import Algorithm
from quantizer.graph.ir import Graph, Node
from quantizer.layerwise.gram import DEEPEST
from quantizer.plan.size import COPIES, alive_bytes, pass_bytes, read_bytes, value_bytes

SEARCHED = 8
"""Copies in float32 while the scales of a weight are searched."""
IN_COLUMNS = 14
"""Copies in float32 while a weight is rounded column by column. They are float, rounded,
transposed and ordered, with errors, scales and zero points, and a second solution. All layers
with one input are solved together.
"""
GRADIENTS = 2
"""Copies of an output while its gradient is drawn."""


def algorithm_bytes(
    graph: Graph,
    layers: Collection[str],
    algorithms: Iterable[Algorithm],
    size: int,
    stored: Callable[[int], int],
) -> int:
    """Return the most bytes that one of the algorithms takes.

    Args:
        layers: whose weights it changes.
        size: samples per batch.
        stored: returns the bytes in memory of values of all batches, from those of one.
    """
    peak = 0
    for settings in algorithms:
        if settings.kind.matrices:
            peak = max(peak, _matrix_bytes(graph, layers, settings, size, stored))
        if getattr(settings.settings, "guidance", 0):
            peak = max(peak, _backward_bytes(graph, size))
    return peak


def _matrix_bytes(
    graph: Graph,
    layers: Collection[str],
    settings: Algorithm,
    size: int,
    stored: Callable[[int], int],
) -> int:
    """Return the bytes for an algorithm with Gram matrices: the values of all batches that it
    stores, and the matrices and weights of a group of layers with one input.
    """
    groups: dict[str, list[Node]] = {}
    for name in layers:
        node = graph.by_name[name]
        if node.is_multiplying and _depth(graph, node) <= DEEPEST:
            source = next(node.refs())
            groups.setdefault(source, []).append(node)
    alive = alive_bytes(graph, size)
    solving = 0
    kept = 0
    last = 0
    for source, nodes in groups.items():
        solving = max(solving, 4 * _solving_values(graph, nodes, settings))
        _, after = alive[source]
        kept = max(kept, after)
        for node in nodes:
            last = max(last, graph.index[node.name])
    return stored(settings.kind.networks * kept) + max(solving, pass_bytes(graph, size, last))


def _backward_bytes(graph: Graph, size: int) -> int:
    """Return the bytes for a backward pass of one batch: what operators read, all weights that
    are read from files, and the gradients of the last value. Layers keep no inputs, as the
    gradients of their weights are not computed.
    """
    total = 0
    values: set[str] = set()
    for node in graph.nodes:
        total += read_bytes(graph, node)
        if not node.params:
            values.update(node.refs())
    last = GRADIENTS * value_bytes(graph, graph.nodes[-1].name, size)
    return total + last + sum(value_bytes(graph, name, size) for name in values)


def _solving_values(graph: Graph, nodes: Sequence[Node], settings: Algorithm) -> int:
    """Return how many float32 values an algorithm needs for the weights of one group."""
    kind = settings.kind
    sizes = [graph.weight(node).numel() for node in nodes]
    matrix = max(_groups(node) * _depth(graph, node) ** 2 for node in nodes)
    matrices = kind.matrices * matrix
    if settings.stage != "round":
        return SEARCHED * max(sizes) + matrices
    # First the matrix is factored, then weights are rounded with what is left of it
    factoring = matrices + COPIES * sum(sizes)
    rounding = (1 + kind.networks) * matrix + IN_COLUMNS * sum(sizes)
    return max(factoring, rounding)


def _depth(graph: Graph, node: Node) -> int:
    """Return the inputs of each output channel of a layer."""
    weight = graph.weight(node)
    channels = weight.shape[0]
    if node.row.transposed:
        channels = weight.shape[1] * _groups(node)
    return weight.numel() // channels


def _groups(node: Node) -> int:
    return int(node.attrs.get("groups", 1))
