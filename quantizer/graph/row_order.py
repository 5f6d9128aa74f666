"""Which rows of an output an operator has put in order by their values (`topk`, `sort`,
`nms`), and what matches them.

Two networks may choose the same rows in another order: then rows are compared by where they
were, not where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.axis_rules import (
    ATTENTION,
    INDEXED,
    MATRIX_PRODUCT,
    PICKED,
    PLAIN_MATRIX_PRODUCT,
)
from quantizer.graph.ir import Graph, Node, Ref, references
from quantizer.graph.label_replay import (
    UNWRITTEN,
    Replay,
    Seen,
    filled,
    is_pointwise,
    moved_operands,
)

_PRODUCTS = (MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT, ATTENTION)


@dataclass(frozen=True)
class RowOrder:
    """What puts rows of an output in order.

    Attributes:
        node: the operator; its last result says which row each was before.
        axis: of that result, along which rows lie.
        replay: leads from its results to the output.
        is_pair: whether the operator gives values and positions.
        unordered: values that are joined with ordered ones and are not in that order.
    """

    node: str
    axis: int
    replay: Replay
    is_pair: bool
    unordered: tuple[str, ...]

    @property
    def watched(self) -> frozenset[str]:
        """The nodes of which a run has to keep shape or values."""
        return self.replay.shaped | self.replay.steering | {self.node}

    def rows(self, seen: Seen, shape: torch.Size) -> Tensor:
        """Return for each value of the output the number of its row, -1 for what is in no
        order.

        Args:
            seen: what a run has shown; rows are numbered as the operator's results lie in
                memory.
            shape: of the output.

        Raises:
            ValueError: the output has another shape, or a value that leads to it cannot be
                followed.
        """
        ordered = seen.shapes.get(self.node, torch.Size())
        numbers = torch.arange(ordered.numel(), dtype=torch.float32).view(ordered)
        labels = {name: filled(seen.shapes[name], UNWRITTEN) for name in self.unordered}
        results = (numbers, numbers) if self.is_pair else numbers
        try:
            rows: Tensor = self.replay.run({**labels, self.node: results}, seen)
        except (RuntimeError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"the rows of {self.replay.end} are not known: {error}") from error
        if rows.shape != shape:
            sizes = f"{list(rows.shape)}, not {list(shape)}"
            raise ValueError(f"the rows of {self.replay.end} have shape {sizes}")
        return rows.to(torch.int64)


def row_order(graph: Graph, end: str) -> RowOrder | None:
    """Return what orders the rows of a node's value; None if nothing does."""
    leads = _operators_before(graph)
    first = leads[end]
    if first is None:
        return None
    carriers: dict[str, str] = {}
    unordered: dict[str, None] = {}
    pending, visited = [end], {first}
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        node = graph.by_name[name]
        operands = list(_row_operands(graph, node))
        ordered = [operand for operand in operands if leads[operand] == first]
        if _is_moving(node):
            pending += ordered
            unordered |= dict.fromkeys(name for name in operands if name not in ordered)
        else:
            carriers[name] = ordered[0]
            pending.append(ordered[0])
    replay = Replay(graph, end, [first, *unordered], carriers, spread=_spread)
    operator = graph.by_name[first]
    axis = 0 if operator.rank == 1 else operator.attrs.get("dim", -1)
    return RowOrder(first, axis, replay, operator.shape is None, tuple(unordered))


def _operators_before(graph: Graph) -> dict[str, str | None]:
    """Return for each node the operator in whose order its rows are, the nearest one before
    it."""
    leads: dict[str, str | None] = {}
    for node in graph.nodes:
        nearest = node.name if node.row.orders else None
        for name in _row_operands(graph, node):
            nearest = nearest or leads[name]
        leads[node.name] = nearest
    return leads


def _is_moving(node: Node) -> bool:
    """Return whether labels go through a node as values do, and nothing that it reads
    decides which."""
    return not _indices(node) and bool(node.row.joins or node.row.only_moves)


def _indices(node: Node) -> list[str]:
    """Return the nodes that say which rows of another value a node takes."""
    if node.row.looks_up:
        return list(references(node.inputs.get("indices")))
    if node.row.axes not in (INDEXED, PICKED):
        return []
    keys = [key for key in ("index", "indices") if key in node.inputs]
    return [name for key in keys for name in references(node.inputs[key])]


def _row_operands(graph: Graph, node: Node) -> Iterator[str]:
    """Yield the operands whose rows are in the order of those that a node makes."""
    if _indices(node):
        yield from _indices(node)
    elif _is_moving(node):
        yield from moved_operands(node)
    elif is_pointwise(node):
        yield from node.refs()
    elif node.row.axes in _PRODUCTS or node.row.spatial == 0:
        yield from list(node.refs())[:1]
    elif node.row.normalizes or node.row.kind == "nonlinear":
        source = graph.source(node)
        if source is not None and source.shape == node.shape:
            yield source.name


def _spread(node: Node, labels: Tensor, shape: torch.Size) -> Tensor:
    """Return the rows of what a node computes, of those of the operand that it keeps the
    rows of."""
    if node.row.axes in _PRODUCTS or node.row.spatial == 0:
        return _along_last(labels).expand(shape)
    if node.row.looks_up:
        return labels.unsqueeze(-1).expand(shape)
    if node.row.axes is INDEXED:
        before = _leading(node.inputs["indices"])
    elif node.row.axes is PICKED and labels.dim() < len(shape):
        before = node.attrs["dim"] % len(shape)
    else:
        return labels.expand(shape)
    after = len(shape) - before - labels.dim()
    return labels.reshape([1] * before + list(labels.shape) + [1] * after).expand(shape)


def _along_last(labels: Tensor) -> Tensor:
    """Return the labels of the first of values along the last axis, all of which must have one.

    Raises:
        ValueError: they have not.
    """
    first = labels[..., :1]
    if not torch.equal(first.expand(labels.shape), labels):
        raise ValueError("rows are mixed")
    return first


def _leading(indices: object) -> int:
    """Return how many axes are taken whole before the first that is indexed."""
    count = 0
    if isinstance(indices, (list, tuple)):
        while count < len(indices) and not isinstance(indices[count], Ref):
            count += 1
    return count


def matched_rows(reference: Tensor, other: Tensor, axis: int) -> Tensor:
    """Return for each row of `reference` the number of the row of `other` that was in the
    same place; -1 for none.

    Args:
        reference: where each row was before it was put in order.
        other: the same of another network.
        axis: along which the rows lie.

    >>> matched_rows(torch.tensor([[5, 2, 9]]), torch.tensor([[2, 5, 7]]), 1)
    tensor([[ 1,  0, -1]])
    """
    rows = reference.movedim(axis, -1)
    others = other.movedim(axis, -1)
    order = others.argsort(dim=-1, stable=True)
    sorted_others = others.gather(-1, order)
    places = torch.searchsorted(sorted_others.contiguous(), rows.contiguous())
    places = places.clamp_max(others.shape[-1] - 1)
    is_there = sorted_others.gather(-1, places) == rows
    numbers = torch.arange(other.numel()).view(other.shape).movedim(axis, -1)
    matches = numbers.gather(-1, order.gather(-1, places))
    return torch.where(is_there, matches, -1).movedim(-1, axis)
