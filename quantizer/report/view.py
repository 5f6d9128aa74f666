"""Lay out tables for a terminal: names of layers, which rows are shown, widths of columns."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantizer.printable import one_line

TableRow = tuple[str, ...]
_EXACT_NAME = re.compile(r"\w+::[\w/\[\].]+")
_GAP = 2
"""Characters between two columns."""
_LEAST = 24
"""Characters that a wrapped text needs to stay readable."""


@dataclass(frozen=True)
class Listing:
    """A table whose first column is a name to copy, so it may wrap but never loses letters.

    The first of `layouts` that fits is shown. Where none does, the text of the last column
    wraps, then the names, in the last layout; where even that is too wide, each row is its name
    and, indented below, its other columns.

    Args:
        titles: of all columns.
        rows: one text for each title.
        numbers: titles of columns that are aligned right and never wrap.
        layouts: titles to show together, the widest layout first; by default all titles.
        note: a line below the table.
    """

    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()
    layouts: tuple[tuple[str, ...], ...] = ()
    note: str = ""

    @property
    def widest(self) -> tuple[str, ...]:
        """Return the titles that are shown where there is room."""
        return self.layouts[0] if self.layouts else self.titles

    def rows_of(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the texts under these titles."""
        columns = [self.titles.index(title) for title in titles]
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            rows.append(tuple(row[column] for column in columns))
        return rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [tuple(map(one_line, row)) for row in self.rows]
        safe = replace(self, rows=rows, note=one_line(self.note))
        yield from safe._laid_out(options)

    def _laid_out(self, options: ConsoleOptions) -> RenderResult:
        """Yield the table, whose texts are safe to show."""
        natural: dict[str, int] = {}
        for column, title in enumerate(self.titles):
            texts = [row[column] for row in self.rows]
            natural[title] = max(map(len, (title, *texts)))
        titles = self._layout(natural, options.max_width)
        widths = self._wrapped(natural, titles, options.max_width)
        rows = self.rows_of(titles)
        if self.note and not rows:
            yield Text(self.note)
            return
        if widths:
            yield self._table(widths, rows)
        else:
            yield from _stacked(titles, rows)
        if self.note:
            yield Text(self.note)

    def _layout(self, natural: Mapping[str, int], width: int) -> tuple[str, ...]:
        """Return the first layout that fits, or the last one."""
        layouts = self.layouts or (self.titles,)
        for titles in layouts:
            if _total(natural, titles) <= width:
                return titles
        return layouts[-1]

    def _wrapped(
        self, natural: Mapping[str, int], titles: Sequence[str], width: int
    ) -> dict[str, int] | None:
        """Return the width of each column, or None if there is no room for them.

        The last column is narrowed first, then the first one.
        """
        widths = {title: natural[title] for title in titles}
        for title in (titles[-1], titles[0]):
            excess = _total(widths, titles) - width
            if excess > 0 and title not in self.numbers:
                widths[title] = max(min(widths[title], _LEAST), widths[title] - excess)
        return widths if _total(widths, titles) <= width else None

    def _table(self, widths: Mapping[str, int], rows: Iterable[tuple[str, ...]]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for title, width in widths.items():
            is_number = title in self.numbers
            justify: JustifyMethod = "right" if is_number else "left"
            table.add_column(title, justify=justify, width=width, overflow="fold")
        for row in rows:
            # Brackets in layer names are not markup.
            table.add_row(*map(Text, row))
        return table


@dataclass(frozen=True)
class View:
    """What tables show of a network: by default all rows, under exact names.

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
        """Return a sentence with its layers named as in tables.

        >>> View({"Net::Net/Linear[fc]/linear": "fc"}).text(
        ...     "quantized at Net::Net/Linear[fc]/linear"
        ... )
        'quantized at fc'
        """
        return _EXACT_NAME.sub(lambda match: self.names.get(match[0], match[0]), sentence)

    def listing(
        self,
        titles: TableRow,
        rows: Sequence[TableRow],
        ranks: Sequence[float | None] | None = None,
        *,
        numbers: TableRow = (),
        layouts: tuple[TableRow, ...] = (),
        what: str = "layer",
        idle: str = "",
        also: str = "",
    ) -> Listing:
        """Return the table of the rows that are to be shown, in their order.

        Each row begins with the exact name of a layer.

        Args:
            titles: as in `Listing`, and so are `rows`, `numbers` and `layouts`.
            ranks: of each row. Where only some are shown, these are the lowest, and none
                without a rank.
            what: what a row is about.
            idle: what the rows without a rank have in common, as in "3 of them without loss".
            also: where else the rows are that are left out.
        """
        ranked: list[tuple[float | None, TableRow]] = []
        for rank, row in zip(ranks or [0.0] * len(rows), rows, strict=True):
            if self.layers is None or row[0] in self.layers:
                ranked.append((rank, row))
        positions = list(range(len(ranked)))
        if self.top is not None:
            by_rank: list[tuple[float, int]] = []
            for position, (rank, _) in enumerate(ranked):
                if rank is not None:
                    by_rank.append((rank, position))
            positions = sorted(position for _, position in sorted(by_rank)[: self.top])
        hidden = len(ranked) - len(positions)
        without_rank = sum(rank is None for rank, _ in ranked)
        note = ""
        if hidden:
            more = " more" if positions else ""
            note = f"{hidden}{more} {what}{'' if hidden == 1 else 's'}"
            if without_rank:
                share = "all" if without_rank == hidden else f"{without_rank} of them"
                note += f", {share} {idle}"
            note += f": {self.remedy}{also}"
        shown = [tuple(map(self.text, ranked[position][1])) for position in positions]
        return Listing(titles, shown, frozenset(numbers), layouts, note)


def _total(widths: Mapping[str, int], titles: Sequence[str]) -> int:
    """Return the width of a table with these columns."""
    return sum(widths[title] for title in titles) + _GAP * (len(titles) - 1)


def _stacked(titles: Sequence[str], rows: Iterable[tuple[str, ...]]) -> RenderResult:
    """Yield each row as its name and, indented below, its other columns."""
    for name, *values in rows:
        yield Text(name)
        labelled: list[str] = []
        for title, value in zip(titles[1:], values, strict=True):
            if value:
                labelled.append(f"{title} {value}")
        yield Padding(Text("  ".join(labelled)), (0, 0, 0, 4))
