"""Divides the values of an output into those of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantizer.comparison.row_matching import MatchedRows
from quantizer.comparison.sample_rows import SampleRows


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
