"""Match rows of an output in two networks, if an operator such as `topk`, `sort` or `nms`
orders them by their values.

Two networks may select the same rows in different orders. So each row is followed back to its
index before that operator, and rows with the same index are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import (
    ATTENTION,
    INDEXED,
    MATRIX_PRODUCT,
    PICKED,
    PLAIN_MATRIX_PRODUCT,
    REDUCED,
)
from quantizer.graph.channels.labels import filled_labels
from quantizer.graph.channels.provenance import Seen, is_pointwise, moved_operands
from quantizer.graph.channels.replay import UNWRITTEN, Replay
from quantizer.graph.ir import Graph, Node, Ref, references

_PRODUCTS = (MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT, ATTENTION)


@dataclass(frozen=True)
class RowOrder:
    """An operator that orders the rows of an output.

    Attributes:
        node: the operator. Its last result has the indices of the selected rows.
        axis: the axis of that result along which rows are.
        operand: the value that the operator orders.
        replay: the nodes from the operator's results to the output.
        is_pair: whether the operator returns values and indices.
        unordered: values that are joined with ordered ones and are not in that order.
        before: the operator that ordered the rows of the operand; None if none did.
        is_traced: whether `before` is known.
        is_reduced: whether an axis is reduced between the operator and the output. It may be
            the axis of rows.
    """

    node: str
    axis: int
    operand: str
    replay: Replay
    is_pair: bool
    unordered: tuple[str, ...]
    before: RowOrder | None
    is_traced: bool
    is_reduced: bool

    @property
    def kept(self) -> frozenset[str]:
        """Return the nodes whose values a run has to record."""
        earlier = frozenset[str]() if self.before is None else self.before.kept
        return self.replay.steering | {self.node} | earlier

    @property
    def watched(self) -> frozenset[str]:
        """Return the nodes whose values or shapes a run has to record."""
        earlier = frozenset[str]() if self.before is None else self.before.watched
        return self.replay.shaped | self.kept | {self.operand} | earlier

    def rows(self, seen: Seen, shape: torch.Size) -> Tensor:
        """Return for each value of the output the number of its row; -1 for values in no row.

        Rows have numbers in the order in which the operator's results are in memory. The nodes
        after it run on these numbers instead of values.

        Args:
            seen: the values and shapes that a run has recorded.
            shape: of the output.

        Raises:
            ValueError: the numbers do not reach the output, or not with its shape.
        """
        result_shape = seen.shapes.get(self.node, torch.Size())
        numbers = torch.arange(result_shape.numel(), dtype=torch.float32).view(result_shape)
        labels = {name: filled_labels(seen.shapes[name], UNWRITTEN) for name in self.unordered}
        results = (numbers, numbers) if self.is_pair else numbers
        try:
            rows: Tensor = self.replay.run({**labels, self.node: results}, seen)
        except (RuntimeError, TypeError, IndexError, KeyError) as error:
            raise ValueError(f"the rows of {self.replay.end} are not known: {error}") from error
        if rows.shape != shape:
            sizes = f"{list(rows.shape)}, not {list(shape)}"
            raise ValueError(f"the rows of {self.replay.end} have shape {sizes}")
        return rows.to(torch.int64)

    def places(self, seen: Seen) -> Tensor:
        """Return a number for each row that is the same in two networks if the row had the same
        index before any operator ordered it.

        Raises:
            ValueError: the index is not known.
        """
        return self._places(seen)[0]

    def _places(self, seen: Seen) -> tuple[Tensor, int]:
        """Return the numbers of `places`, and the first number above all that are possible.

        If another operator ordered the operand before, a value's number follows from its row
        there: that number times the values in a row, plus its place in the row.
        """
        is_seen = self.node in seen.values and self.operand in seen.shapes
        if not self.is_traced or not is_seen:
            raise ValueError(f"the rows of {self.operand} are not known")
        indices: Tensor = seen.values[self.node]
        shape = seen.shapes[self.operand]
        if indices.dim() != len(shape) or not shape:
            raise ValueError(f"{self.node} selects no rows of {self.operand}")
        if self.before is None:
            places = _unique_places(indices, self.axis, shape[self.axis])
            return places, shape.numel()
        earlier, end = self.before._places(seen)
        table = places_of_rows(self.before.rows(seen, shape).reshape(-1), earlier.numel())
        if table is None:
            raise ValueError(f"the rows of {self.operand} have different lengths")
        of_rows, outside = table
        width = of_rows.shape[1]
        end *= width
        numbers = torch.empty(shape.numel(), dtype=torch.int64)
        numbers[of_rows] = earlier.reshape(-1, 1) * width + torch.arange(width)
        # Values in no row get numbers that no row has
        numbers[outside] = end + torch.arange(len(outside))
        places = numbers.view(shape).gather(self.axis, indices)
        return places, end + len(outside)


def _unique_places(indices: Tensor, axis: int, length: int) -> Tensor:
    """Return indices along an axis, plus `length` times the number of their line, so that they
    differ between lines. A line is all that differs in this axis only.
    """
    line_shape = list(indices.shape)
    line_shape[axis] = 1
    line_numbers = torch.arange(torch.Size(line_shape).numel()).view(line_shape)
    return indices + line_numbers * length


def places_of_rows(rows: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the places of each row's values, [rows, values], and those of values in no row.

    Return None if rows have different numbers of values.

    Args:
        rows: the number of the row of each value; -1 for values in no row.
        count: how many rows there are.
    """
    order = rows.argsort(stable=True)
    # Values in no row are sorted before all others
    outside_count = int((rows < 0).sum())
    if not count or (len(rows) - outside_count) % count:
        return None
    counts = torch.bincount(rows[rows >= 0], minlength=count)
    if bool((counts != counts[0]).any()):
        return None
    return order[outside_count:].view(count, -1), order[:outside_count]


def row_order(graph: Graph, end: str) -> RowOrder | None:
    """Return the operator that orders the rows of a node's value; None if none does."""
    return _row_order(graph, end, _orders(graph))


def _row_order(graph: Graph, end: str, orders: _Orders) -> RowOrder | None:
    """Return the operator that orders the rows of the value of `end`.

    Walk from `end` back to that operator, along operands whose rows it has ordered as well.
    """
    nearest = orders.nearest
    operator_name = nearest[end]
    if operator_name is None:
        return None
    carriers: dict[str, str] = {}
    unordered: dict[str, None] = {}
    is_reduced = False
    pending = [end]
    visited = {operator_name}
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        node = graph.by_name[name]
        operands = list(_row_operands(graph, node))
        ordered = [operand for operand in operands if nearest[operand] == operator_name]
        if _is_moving(node):
            pending += ordered
            others = [operand for operand in operands if operand not in ordered]
            unordered |= dict.fromkeys(others)
        else:
            is_reduced |= node.row.axes is REDUCED
            carriers[name] = _carrier(graph, node, ordered, orders.reduced)
            pending.append(carriers[name])
    operator = graph.by_name[operator_name]
    operand = _ordered_operand(operator)
    axis = 0 if operator.rank == 1 else operator.attrs.get("dim", -1)
    return RowOrder(
        node=operator_name,
        axis=axis,
        operand=operand,
        replay=Replay(graph, end, [operator_name, *unordered], carriers, spread=_spread),
        is_pair=operator.shape is None,
        unordered=tuple(unordered),
        before=_row_order(graph, operand, orders),
        is_traced=operand not in orders.mixed,
        is_reduced=is_reduced,
    )


def _ordered_operand(operator: Node) -> str:
    """Return the operand that an operator orders; of boxes and scores, the scores."""
    scores = list(references(operator.inputs.get("scores")))
    return scores[0] if scores else next(iter(operator.refs()))


def _carrier(graph: Graph, node: Node, ordered: list[str], reduced: Collection[str]) -> str:
    """Return the operand whose rows a node keeps, preferably one that is neither reduced nor
    expanded.
    """

    def faults(operand: str) -> tuple[bool, bool]:
        is_expanded = graph.by_name[operand].shape != node.shape
        return operand in reduced, is_expanded

    return min(ordered, key=faults)


@dataclass(frozen=True)
class _Orders:
    """The order of the rows of each node.

    Attributes:
        nearest: for each node the nearest operator before it that orders its rows.
        mixed: the nodes that depend on ordered rows and whose own order is not known.
        reduced: the nodes whose rows may each be computed from several ordered rows.
    """

    nearest: dict[str, str | None]
    mixed: set[str]
    reduced: set[str]


def _orders(graph: Graph) -> _Orders:
    """Return the order of the rows of each node."""
    nearest: dict[str, str | None] = {}
    mixed: set[str] = set()
    reduced: set[str] = set()
    for node in graph.nodes:
        operands = list(_row_operands(graph, node))
        ordered = [name for name in operands if nearest[name] is not None]
        nearest[node.name] = nearest[ordered[0]] if ordered else None
        if node.row.orders:
            nearest[node.name] = node.name
        # With one operand that is not reduced, the rows are followed through that one
        if node.row.axes is REDUCED or (ordered and reduced.issuperset(ordered)):
            reduced.add(node.name)
        if nearest[node.name] is None and node.row.reads_values:
            sources = list(node.refs())
            if _keeps_first_rows(node):
                sources = sources[:1]
            if any(nearest[name] is not None or name in mixed for name in sources):
                mixed.add(node.name)
    return _Orders(nearest, mixed, reduced)


def _is_moving(node: Node) -> bool:
    """Return whether a node moves labels as it moves values, without indices."""
    return not _indices(node) and bool(node.row.joins or node.row.only_moves)


def _keeps_first_rows(node: Node) -> bool:
    """Return whether the rows of a node's output are those of its first operand."""
    return node.row.axes in _PRODUCTS or node.row.spatial == 0


def _indices(node: Node) -> list[str]:
    """Return the nodes that decide which rows of another value a node takes."""
    if node.row.looks_up:
        return list(references(node.inputs.get("indices")))
    if node.row.axes in (INDEXED, PICKED):
        return list(references([node.inputs.get("index"), node.inputs.get("indices")]))
    return []


def _row_operands(graph: Graph, node: Node) -> Iterator[str]:
    """Yield the operands whose rows are in the same order as those of the node's output."""
    if _indices(node):
        yield from _indices(node)
    elif _is_moving(node):
        yield from moved_operands(node)
    elif is_pointwise(node):
        yield from node.refs()
    elif _keeps_first_rows(node) or node.row.axes is REDUCED:
        yield from list(node.refs())[:1]
    elif node.row.normalizes or node.row.kind == "nonlinear":
        source = graph.source(node)
        if source is not None and source.shape == node.shape:
            yield source.name


def _spread(node: Node, labels: Tensor, shape: torch.Size) -> Tensor:
    """Return the row numbers of a node's output.

    Args:
        node: the node.
        labels: the row numbers of the operand whose rows it keeps.
        shape: of the output.

    Raises:
        ValueError: the node mixes rows.
    """
    if _keeps_first_rows(node):
        return _along_last(labels).expand(shape)
    if node.row.axes is REDUCED:
        return _reduced(node, labels).expand(shape)
    if node.row.looks_up:
        return labels.unsqueeze(-1).expand(shape)
    if node.row.axes is INDEXED:
        axes_before = _leading(node.inputs["indices"])
    elif node.row.axes is PICKED and labels.dim() < len(shape):
        axes_before = node.attrs["dim"] % len(shape)
    else:
        return labels.expand(shape)
    axes_after = len(shape) - axes_before - labels.dim()
    sizes = [*[1] * axes_before, *labels.shape, *[1] * axes_after]
    return labels.reshape(sizes).expand(shape)


def _along_last(labels: Tensor) -> Tensor:
    """Return the first labels along the last axis.

    Raises:
        ValueError: the labels differ along that axis.
    """
    first = labels[..., :1]
    if not torch.equal(first.expand(labels.shape), labels):
        raise ValueError("rows are mixed")
    return first


def _reduced(node: Node, labels: Tensor) -> Tensor:
    """Return the labels after a reduction.

    Raises:
        ValueError: the labels of reduced values differ.
    """
    arguments = {**node.attrs, **node.inputs}
    axes = arguments.get("dim")
    if axes is None or axes == []:
        axes = list(range(labels.dim()))
    keepdim = bool(arguments.get("keepdim", False))
    lowest = labels.amin(axes, keepdim=keepdim)
    if not torch.equal(lowest, labels.amax(axes, keepdim=keepdim)):
        raise ValueError("rows are mixed")
    return lowest


def _leading(indices: Iterable[object]) -> int:
    """Return how many axes are taken whole before the first that is indexed."""
    count = 0
    for index in indices:
        if isinstance(index, Ref):
            break
        count += 1
    return count
