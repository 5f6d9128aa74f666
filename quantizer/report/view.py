"""Lay out tables for a terminal: choose rows and columns, name layers, and fit the width."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantizer.config.wording import counted
from quantizer.printable import one_line

TableRow = tuple[str, ...]
RowRanks = Sequence[float | None]
_EXACT_NAME = re.compile(r"\w+::[\w/\[\].]+")
TOP_REMEDY = "--top all shows them"
"""How to see the rows that a table leaves out."""
_GAP = 2
"""Characters between two columns."""
_MIN_WRAPPED_WIDTH = 24
"""Characters that a wrapped text needs to stay readable."""


@dataclass(frozen=True)
class Listing:
    """A table whose first column is a name that users copy. It may wrap, but is never
    shortened.

    The first of `layouts` that fits the terminal is shown. If none fits, the last one is shown,
    and its last column wraps, then the names. If even that is too wide, each row becomes its
    name, and indented below it the other columns.

    Args:
        titles: of all columns.
        rows: one text for each title.
        numbers: titles of columns that are aligned right and never wrap.
        layouts: titles to show together, the widest layout first; by default all titles.
        note: a line to show below the table.
    """

    titles: TableRow
    rows: Sequence[TableRow]
    numbers: frozenset[str] = frozenset()
    layouts: tuple[TableRow, ...] = ()
    note: str = ""

    @property
    def widest(self) -> TableRow:
        """Return the titles that are shown where there is room."""
        return self.layouts[0] if self.layouts else self.titles

    def rows_of(self, titles: TableRow) -> list[TableRow]:
        """Return the texts under these titles."""
        columns = [self.titles.index(title) for title in titles]
        return [tuple(row[column] for column in columns) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [tuple(map(one_line, row)) for row in self.rows]
        printable = replace(self, rows=rows, note=one_line(self.note))
        yield from printable._render(options.max_width)

    def _render(self, max_width: int) -> RenderResult:
        """Yield the table and its note. All texts must be printable."""
        columns = zip(self.titles, *self.rows, strict=True)
        natural_widths = [max(map(len, column)) for column in columns]
        for titles in self.layouts or (self.titles,):
            widths = {title: natural_widths[self.titles.index(title)] for title in titles}
            if _table_width(widths) <= max_width:
                break
        self._narrow(widths, max_width)
        rows = self.rows_of(titles)
        if rows or not self.note:
            if _table_width(widths) <= max_width:
                yield self._table(widths, rows)
            else:
                yield from _stack_columns(titles, rows)
        if self.note:
            yield Text(self.note)

    def _narrow(self, widths: dict[str, int], max_width: int) -> None:
        """Reduce the width of the last column, then of the first one, as far as needed."""
        titles = list(widths)
        for title in (titles[-1], titles[0]):
            excess = _table_width(widths) - max_width
            if excess > 0 and title not in self.numbers:
                min_width = min(widths[title], _MIN_WRAPPED_WIDTH)
                widths[title] = max(min_width, widths[title] - excess)

    def _table(self, widths: Mapping[str, int], rows: Iterable[TableRow]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        for title, width in widths.items():
            justify: JustifyMethod = "right" if title in self.numbers else "left"
            table.add_column(title, justify=justify, width=width, overflow="fold")
        for name, *values in rows:
            lines = _lines_of_name(name, next(iter(widths.values())))
            # Brackets in layer names are not markup.
            table.add_row(*map(Text, (lines, *values)))
        return table


@dataclass(frozen=True)
class TableView:
    """Which rows tables show of a network, and under which names. By default they show all rows
    under exact names.

    Args:
        names: the name to show for each exact name of a layer.
        top: the most rows to show. Rows without a rank are then never shown. None shows all.
        layers: the exact names of the layers to show. None shows all.
        remedy: how to see the rows that are not shown.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    top: int | None = None
    layers: frozenset[str] | None = None
    remedy: str = TOP_REMEDY

    @property
    def is_exact(self) -> bool:
        """Return whether layers have their exact names."""
        return not self.names

    def text(self, sentence: str) -> str:
        """Return a sentence with its layers named as in tables.

        >>> TableView({"Net::Net/Linear[fc]/linear": "fc"}).text(
        ...     "quantized at Net::Net/Linear[fc]/linear"
        ... )
        'quantized at fc'
        """
        return _EXACT_NAME.sub(lambda match: self.names.get(match[0], match[0]), sentence)

    def listing(
        self,
        titles: TableRow,
        rows: Sequence[TableRow],
        ranks: RowRanks | None = None,
        *,
        numbers: TableRow = (),
        layouts: tuple[TableRow, ...] = (),
        what: str = "layer",
        idle: str = "",
        file: str = "",
    ) -> Listing:
        """Return the table of the rows that are to be shown, in their order.

        Each row begins with the exact name of a layer.

        Args:
            titles: as in `Listing`.
            rows: as in `Listing`.
            ranks: of each row. If there are too many rows, those with the lowest ranks are
                shown. None marks rows that are not worth showing then.
            numbers: as in `Listing`.
            layouts: as in `Listing`.
            what: the noun for a row.
            idle: what the rows without a rank have in common, as in "3 of them without loss".
            file: the file that has all rows.
        """
        ranked = zip(rows, ranks or [0.0] * len(rows), strict=True)
        kept = [
            (row, rank) for row, rank in ranked if self.layers is None or row[0] in self.layers
        ]
        selected = [row for row, _ in kept]
        selected_ranks = [rank for _, rank in kept]
        positions = self._shown_positions(selected_ranks)
        hidden = len(selected) - len(positions)
        note = ""
        if hidden:
            note = counted(hidden, what)
            if positions:
                note = f"… {counted(hidden, f'more {what}')}"
            if file:
                note += f" in {file}"
            idle_rows = selected_ranks.count(None)
            if idle_rows == hidden:
                note += f", all {idle}"
            elif idle_rows:
                note += f", {idle_rows} of them {idle}"
            note += f"; {self.remedy}"
        shown = [tuple(map(self.text, selected[position])) for position in positions]
        return Listing(titles, shown, frozenset(numbers), layouts, note)

    def _shown_positions(self, ranks: RowRanks) -> list[int]:
        """Return the positions of the rows with the lowest ranks."""
        if self.top is None:
            return list(range(len(ranks)))
        ranked = [(rank, place) for place, rank in enumerate(ranks) if rank is not None]
        lowest = sorted(ranked)[: self.top]
        return sorted(position for _, position in lowest)


def _lines_of_name(name: str, width: int) -> str:
    """Return a name in lines of at most `width` characters, which end behind dots or slashes
    where that is possible.

    >>> print(_lines_of_name("model.layers.0.self_attn.q_proj", 24))
    model.layers.0.
    self_attn.q_proj
    """
    lines = [""]
    for part in re.split(r"(?<=[./])", name):
        joined = lines[-1] + part
        if lines[-1] and len(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _table_width(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _stack_columns(titles: TableRow, rows: Iterable[TableRow]) -> RenderResult:
    """Yield each row as its name and, indented below, its other columns."""
    for name, *values in rows:
        yield Text(name)
        labelled = []
        for title, value in zip(titles[1:], values, strict=True):
            if value:
                labelled.append(f"{title} {value}")
        yield Padding(Text("  ".join(labelled)), (0, 0, 0, 4))
