"""Matches rows of the same output in two networks, if an operator such as a sort puts them in
an order that depends on values. Divides the values of an output into those of its parts.

A place is an index into the flattened output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.output_figures import RowCounts
from quantizer.comparison.samples import SampleRows
from quantizer.graph.channels.provenance import Seen, SeenOutput
from quantizer.graph.channels.row_order import RowOrder, places_of_rows


@dataclass(frozen=True)
class MatchedRows:
    """Where the values of the float network's output are in the quantized network's output.

    Args:
        places: [values] the place of each value in the quantized network's output.
        is_there: [values] whether the quantized network has the row of the value.
        counts: of rows.
    """

    places: Tensor
    is_there: Tensor
    counts: RowCounts

    def select(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of rows that both networks have, in the order of the float one.

        Args:
            x: the output of the float network, of any shape.
            y: the output of the quantized network.

        Returns:
            Two tensors [shared values].
        """
        y_places = self.places[self.is_there]
        x = x.reshape(-1)[self.is_there.to(x.device)]
        y = y.reshape(-1)[y_places.to(y.device)]
        return x, y


def match_rows(
    order: RowOrder, reference: SeenOutput, quantized: SeenOutput
) -> MatchedRows | None:
    """Match the rows of both networks that had the same origin before they were ordered.

    Return None if the origins of a network's rows are not known.

    Args:
        order: the operator that orders rows, and the way from it to the output.
        reference: the output of the float network.
        quantized: the output of the quantized network.
    """
    x_rows = _rows(order, reference)
    y_rows = _rows(order, quantized)
    if x_rows is None or y_rows is None:
        return None
    if x_rows.values.shape[1] != y_rows.values.shape[1]:
        return None
    if x_rows.outside.shape != y_rows.outside.shape:
        return None
    # For each row of the float network the row of the quantized one, -1 if it has none
    matches = matched_rows(x_rows.origins, y_rows.origins, order.axis)
    matches = matches.reshape(-1)
    is_shared = matches >= 0
    x_places = x_rows.values[is_shared].reshape(-1)
    y_places = y_rows.values[matches[is_shared]].reshape(-1)
    size = reference.value.numel()
    places = torch.zeros(size, dtype=torch.int64)
    # Values that are in no row correspond by their order
    places[x_rows.outside] = y_rows.outside
    places[x_places] = y_places
    is_there = torch.zeros(size, dtype=torch.bool)
    is_there[x_rows.outside] = True
    is_there[x_places] = True
    rows = len(matches)
    is_moved = is_shared & (matches != torch.arange(rows))
    # The quantized network has other rows instead
    exchanged = rows - int(is_shared.sum())
    counts = RowCounts(rows, int(is_moved.sum()), exchanged)
    return MatchedRows(places, is_there, counts)


def matched_rows(reference: Tensor, other: Tensor, axis: int) -> Tensor:
    """Return for each row of `reference` the number of the row of `other` that came from the
    same place; -1 if there is none.

    Args:
        reference: the place of each row before it was ordered, as `RowOrder.places` returns it.
        other: the places in another network.
        axis: along which the rows are.

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


@dataclass(frozen=True)
class _Rows:
    """The rows of an output.

    Args:
        values: [rows, values] the places of each row's values.
        outside: the places of values that are in no row.
        origins: the index that each row had before it was ordered.
    """

    values: Tensor
    outside: Tensor
    origins: Tensor


def _rows(order: RowOrder, run: SeenOutput) -> _Rows | None:
    """Return the rows of an output; None if their origins are not known."""
    seen = run.seen
    if order.node not in seen.values:
        return None
    try:
        rows = order.rows(seen, run.value.shape)
        origins = order.places(seen)
    except ValueError:
        return None
    count = seen.values[order.node].numel()
    table = places_of_rows(rows.reshape(-1), count)
    if table is None:
        return None
    values, outside = table
    return _Rows(values, outside, origins)


def count_unmatched(order: RowOrder, seen: Seen) -> RowCounts | None:
    """Return the counts of rows that were not matched, and were compared by place.

    Return None if a later operator may have reduced the rows: then their order makes no
    difference.
    """
    if order.is_reduced:
        return None
    indices = seen.values.get(order.node)
    # Without the indices, the number of rows is not known; one row stands for them
    unmatched = 1
    if isinstance(indices, Tensor):
        unmatched = indices.numel()
    return RowCounts(unmatched=unmatched)


class PartPlaces:
    """The places of all parts of an output, one part after the other.

    Args:
        labels: the number of the part of each value; -1 for values that no layer has written.
        parts: how many parts there are.
    """

    def __init__(self, labels: Tensor, parts: int) -> None:
        flat = labels.reshape(-1)
        sizes = torch.bincount(flat + 1, minlength=parts + 1)
        unwritten, *counts = sizes.tolist()
        self.is_unwritten = unwritten > 0
        self._counts: list[int] = counts
        # Values that are not written come first
        self._order = flat.argsort(stable=True)[unwritten:]
        # By the number of samples
        self._rows: dict[int, list[SampleRows]] = {}

    def of(self, x: Tensor) -> Sequence[Tensor]:
        """Return the values of each part."""
        order = self._order.to(x.device)
        values = x.reshape(-1)[order]
        return torch.split(values, self._counts)

    def rows(
        self, rows: SampleRows, shape: torch.Size, matched: MatchedRows | None
    ) -> list[SampleRows]:
        """Return where the samples of each part are.

        Args:
            rows: where those of the output are.
            shape: of the output.
            matched: the rows of both networks; None if all values are compared.
        """
        if matched is None and rows.count in self._rows:
            return self._rows[rows.count]
        rows_of_parts = []
        for places in self._places(matched):
            of_part = rows.of_places(places, shape)
            rows_of_parts.append(of_part)
        if matched is None:
            self._rows[rows.count] = rows_of_parts
        return rows_of_parts

    def matched(
        self, x: Tensor, y: Tensor, matched: MatchedRows
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of each part that are in rows of both networks."""
        x_values = x.reshape(-1)
        y_values = y.reshape(-1)
        x_pieces = []
        y_pieces = []
        for shared in self._places(matched):
            others = matched.places[shared]
            x_pieces.append(x_values[shared.to(x.device)])
            y_pieces.append(y_values[others.to(y.device)])
        return x_pieces, y_pieces

    def _places(self, matched: MatchedRows | None) -> Iterator[Tensor]:
        """Yield the places of each part, without rows that are not in both networks."""
        for places in torch.split(self._order, self._counts):
            if matched is None:
                yield places
            else:
                yield places[matched.is_there[places]]
