"""Matches rows of the same output in two networks, if an operator such as a sort puts them in
an order that depends on values.

A place is an index into the flattened output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.output_figures import RowCounts
from quantizer.graph.label_replay import Seen
from quantizer.graph.row_order import RowOrder, matched_rows, places_of_rows


@dataclass(frozen=True)
class SeenOutput:
    """The value of an output in one run, and the shapes and values recorded in that run."""

    value: Tensor
    seen: Seen


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
