"""Matches the rows of an output of two networks, where an operator puts rows in an order that
depends on values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.output_figures import RowCounts
from quantizer.graph.label_replay import Seen
from quantizer.graph.row_order import RowOrder, matched_rows, places_of_rows


@dataclass(frozen=True)
class SeenOutput:
    """The value of an output in one run, and what was recorded of the run."""

    value: Tensor
    seen: Seen


@dataclass(frozen=True)
class MatchedRows:
    """The place of each value of the float network's output in that of the quantized network.

    Args:
        places: [values] places.
        is_there: [values] whether the quantized network has the row of the value.
        counts: of rows.
    """

    places: Tensor
    is_there: Tensor
    counts: RowCounts

    def select(
        self,
        x: Tensor,
        y: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the values of rows that both networks have, side by side."""
        others = self.places[self.is_there]
        x = x.reshape(-1)[self.is_there.to(x.device)]
        y = y.reshape(-1)[others.to(y.device)]
        return x, y


def match_rows(
    order: RowOrder,
    reference: SeenOutput,
    quantized: SeenOutput,
) -> MatchedRows | None:
    """Return which values belong together; None if the rows of a network cannot be followed
    from where they were at first to its output.
    """
    x_rows = _rows(order, reference)
    y_rows = _rows(order, quantized)
    if x_rows is None or y_rows is None:
        return None
    if x_rows.values.shape[1] != y_rows.values.shape[1]:
        return None
    if x_rows.outside.shape != y_rows.outside.shape:
        return None
    matches = matched_rows(x_rows.origins, y_rows.origins, order.axis)
    matches = matches.reshape(-1)
    is_shared = matches >= 0
    x_places = x_rows.values[is_shared].reshape(-1)
    y_places = y_rows.values[matches[is_shared]].reshape(-1)
    size = reference.value.numel()
    places = torch.zeros(size, dtype=torch.int64)
    places[x_rows.outside] = y_rows.outside
    places[x_places] = y_places
    is_there = torch.zeros(size, dtype=torch.bool)
    is_there[x_rows.outside] = True
    is_there[x_places] = True
    rows = len(matches)
    is_moved = is_shared & (matches != torch.arange(rows))
    exchanged = rows - int(is_shared.sum())
    counts = RowCounts(rows, int(is_moved.sum()), exchanged)
    return MatchedRows(places, is_there, counts)


@dataclass(frozen=True)
class _Rows:
    """The rows of an output.

    Args:
        values: [rows, values] places of the values of each row.
        outside: places of values that are in no row.
        origins: where each row was at first.
    """

    values: Tensor
    outside: Tensor
    origins: Tensor


def _rows(order: RowOrder, run: SeenOutput) -> _Rows | None:
    """Return the rows of an output; None if they cannot be followed."""
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
    return None if table is None else _Rows(*table, origins)


def count_unmatched(order: RowOrder, seen: Seen) -> RowCounts | None:
    """Return the counts of rows that were compared by place.

    They are None if the rows may have been reduced, so that their order makes no difference.
    """
    if order.is_reduced:
        return None
    positions = seen.values.get(order.node)
    unmatched = 1
    if isinstance(positions, Tensor):
        unmatched = positions.numel()
    return RowCounts(unmatched=unmatched)
