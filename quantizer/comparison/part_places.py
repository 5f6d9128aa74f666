"""Divides the values of an output into those of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantizer.comparison.row_matching import MatchedRows
from quantizer.comparison.sample_noise import SampleRows


class PartPlaces:
    """The places of all parts of an output, one part after the other.

    Args:
        labels: the number of the part of each value; -1 for values that no layer has written.
        parts: how many parts there are.
    """

    def __init__(self, labels: Tensor, parts: int) -> None:
        flat = labels.reshape(-1)
        unwritten, *counts = torch.bincount(flat + 1, minlength=parts + 1).tolist()
        self.is_unwritten = unwritten > 0
        self._counts: list[int] = counts
        # Values that are not written come first
        self._order = flat.argsort(stable=True)[unwritten:]
        self._rows: list[SampleRows | None] | None = None

    def of(self, x: Tensor) -> Sequence[Tensor]:
        """Return the values of each part."""
        order = self._order.to(x.device)
        values = x.reshape(-1)[order]
        return torch.split(values, self._counts)

    def rows(
        self, rows: SampleRows | None, shape: torch.Size, matched: MatchedRows | None
    ) -> list[SampleRows | None]:
        """Return where the samples of each part are.

        Args:
            rows: where those of the output are; None if that is not known.
            shape: of the output.
            matched: the rows of both networks; None if all values are compared.
        """
        if rows is None:
            return [None] * len(self._counts)
        if matched is None and self._rows is not None:
            return self._rows
        rows_of_parts: list[SampleRows | None] = []
        for places in torch.split(self._order, self._counts):
            if matched is not None:
                places = places[matched.is_there[places]]
            rows_of_parts.append(rows.of_places(places, shape))
        if matched is None:
            self._rows = rows_of_parts
        return rows_of_parts

    def matched(
        self,
        x: Tensor,
        y: Tensor,
        matched: MatchedRows,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values of each part that are in rows of both networks."""
        x_pieces = []
        y_pieces = []
        for places in torch.split(self._order, self._counts):
            shared = places[matched.is_there[places]]
            others = matched.places[shared]
            x_pieces.append(x.reshape(-1)[shared.to(x.device)])
            y_pieces.append(y.reshape(-1)[others.to(y.device)])
        return x_pieces, y_pieces
