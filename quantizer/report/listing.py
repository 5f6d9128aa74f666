"""Rows under titles, laid out for the width of the terminal. Knows neither layers nor plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2
_LEAST = 24
"""Characters between two columns, and those that a wrapped text needs to stay readable."""


@dataclass(frozen=True)
class Listing:
    """A table whose first column is a name to copy, so it may wrap but never loses letters.

    The first of `layouts` that fits is shown. Where none does, the text of the last column wraps, then the names, in
    the last layout; where even that is too wide, each row is its name and, indented below, its other columns.

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
        """The titles that are shown where there is room."""
        return self.layouts[0] if self.layouts else self.titles

    def rows_of(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """The texts under these titles."""
        chosen = [self.titles.index(title) for title in titles]
        return [tuple(row[at] for at in chosen) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {title: [row[at] for row in self.rows] for at, title in enumerate(self.titles)}
        natural = {title: max(map(len, (title, *texts))) for title, texts in cells.items()}
        layouts = self.layouts or (self.titles,)
        titles = next((each for each in layouts if _total(natural, each) <= options.max_width), layouts[-1])
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

    def _wrapped(self, natural: Mapping[str, int], titles: Sequence[str], width: int) -> dict[str, int] | None:
        """The width of each column, the last and the first one narrowed as far as need be; None if that won't do."""
        widths = {title: natural[title] for title in titles}
        for title in (titles[-1], titles[0]):
            excess = _total(widths, titles) - width
            if excess > 0 and title not in self.numbers:
                widths[title] = max(min(widths[title], _LEAST), widths[title] - excess)
        return widths if _total(widths, titles) <= width else None

    def _table(self, widths: Mapping[str, int], rows: Iterable[tuple[str, ...]]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for title, width in widths.items():
            side = "right" if title in self.numbers else "left"
            table.add_column(title, justify=side, width=width, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*map(Text, row))  # brackets in layer names are not markup
        return table


def _total(widths: Mapping[str, int], titles: Sequence[str]) -> int:
    return sum(widths[title] for title in titles) + _GAP * (len(titles) - 1)


def _stacked(titles: Sequence[str], rows: Iterable[tuple[str, ...]]) -> RenderResult:
    """Each row as its name and, indented below, its other columns."""
    for name, *values in rows:
        yield Text(name)
        labelled = [f"{title} {value}" for title, value in zip(titles[1:], values, strict=True) if value]
        yield Padding(Text("  ".join(labelled)), (0, 0, 0, 4))
