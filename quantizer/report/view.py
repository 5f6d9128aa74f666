"""What tables call the layers of a network, and which rows they show: one way for all tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantizer.report.listing import Listing

Row = tuple[str, ...]
_EXACT_NAME = re.compile(r"\w+::[\w/\[\].]+")


@dataclass(frozen=True)
class View:
    """By default all rows, under exact names.

    Args:
        names: exact name -> what the layer is called in tables.
        top: the most rows to show; rows that say little are then left out, too. None shows all.
        layers: exact names of the layers to show; None shows all.
        remedy: how to see the rows that are left out.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    top: int | None = None
    layers: frozenset[str] | None = None
    remedy: str = "--top all shows them"

    def text(self, sentence: str) -> str:
        """The sentence with its layers called as in tables.

        >>> View({"Net::Net/Linear[fc]/linear": "fc"}).text("quantized at Net::Net/Linear[fc]/linear")
        'quantized at fc'
        """
        return _EXACT_NAME.sub(lambda found: self.names.get(found[0], found[0]), sentence)

    def listing(
        self,
        titles: Row,
        rows: Sequence[Row],
        ranks: Sequence[float | None] | None = None,
        *,
        numbers: Row = (),
        layouts: tuple[Row, ...] = (),
        what: str = "layer",
        idle: str = "",
        also: str = "",
    ) -> Listing:
        """The table of those rows that are to be shown, in the order given, each beginning with a layer's exact name.

        Args:
            titles: as in `Listing`, and so are `rows`, `numbers` and `layouts`.
            ranks: of each row. Where only some are shown, these are the lowest, and none without a rank.
            what: what a row is about.
            idle: what the rows without a rank have in common, as in "3 of them without loss".
            also: where else the rows are that are left out.
        """
        ranked = [
            (rank, row)
            for rank, row in zip(ranks or [0.0] * len(rows), rows, strict=True)
            if self.layers is None or row[0] in self.layers
        ]
        kept = list(range(len(ranked)))
        if self.top is not None:
            by_rank = sorted((rank, at) for at, (rank, _) in enumerate(ranked) if rank is not None)
            kept = sorted(at for _, at in by_rank[: self.top])
        hidden, idling = len(ranked) - len(kept), sum(rank is None for rank, _ in ranked)
        share = f", {'all' if idling == hidden else f'{idling} of them'} {idle}" if idling else ""
        count = f"{hidden}{' more' if kept else ''} {what}{'' if hidden == 1 else 's'}"
        note = f"{count}{share}: {self.remedy}{also}" if hidden else ""
        shown = [tuple(map(self.text, ranked[at][1])) for at in kept]
        return Listing(titles, shown, frozenset(numbers), layouts, note)
