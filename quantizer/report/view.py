"""Tables for a terminal: what they call the layers of a network, which rows they show, and how
these are laid out.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quantizer.printable import one_line

Row = tuple[str, ...]
_EXACT_NAME = re.compile(r"\w+::[\w/\[\].]+")
_GAP = 2
_LEAST = 24
"""Characters between two columns, and those that a wrapped text needs to stay readable."""


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
        """The titles that are shown where there is room."""
        return self.layouts[0] if self.layouts else self.titles

    def rows_of(self, titles: Sequence[str]) -> list[tuple[str, ...]]:
        """The texts under these titles."""
        chosen = [self.titles.index(title) for title in titles]
        return [tuple(row[at] for at in chosen) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = replace(
            self,
            rows=[tuple(map(one_line, row)) for row in self.rows],
            note=one_line(self.note),
        )
        yield from shown._laid_out(options)

    def _laid_out(self, options: ConsoleOptions) -> RenderResult:
        """The table of texts that are safe to show."""
        cells = {title: [row[at] for row in self.rows] for at, title in enumerate(self.titles)}
        natural = {title: max(map(len, (title, *texts))) for title, texts in cells.items()}
        layouts = self.layouts or (self.titles,)
        titles = next(
            (each for each in layouts if _total(natural, each) <= options.max_width),
            layouts[-1],
        )
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

    def _wrapped(
        self, natural: Mapping[str, int], titles: Sequence[str], width: int
    ) -> dict[str, int] | None:
        """The width of each column, the last and the first one narrowed as far as need be; None
        if that won't do.
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
            table.add_column(
                title,
                justify="right" if title in self.numbers else "left",
                width=width,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*map(Text, row))  # brackets in layer names are not markup
        return table


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

        >>> View({"Net::Net/Linear[fc]/linear": "fc"}).text(
        ...     "quantized at Net::Net/Linear[fc]/linear"
        ... )
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
        """The table of those rows that are to be shown, in the order given, each beginning with
        a layer's exact name.

        Args:
            titles: as in `Listing`, and so are `rows`, `numbers` and `layouts`.
            ranks: of each row. Where only some are shown, these are the lowest, and none
                without a rank.
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
            by_rank = sorted(
                (rank, at) for at, (rank, _) in enumerate(ranked) if rank is not None
            )
            kept = sorted(at for _, at in by_rank[: self.top])
        hidden, idling = len(ranked) - len(kept), sum(rank is None for rank, _ in ranked)
        share = (
            f", {'all' if idling == hidden else f'{idling} of them'} {idle}" if idling else ""
        )
        count = f"{hidden}{' more' if kept else ''} {what}{'' if hidden == 1 else 's'}"
        note = f"{count}{share}: {self.remedy}{also}" if hidden else ""
        shown = [tuple(map(self.text, ranked[at][1])) for at in kept]
        return Listing(titles, shown, frozenset(numbers), layouts, note)


def _total(widths: Mapping[str, int], titles: Sequence[str]) -> int:
    return sum(widths[title] for title in titles) + _GAP * (len(titles) - 1)


def _stacked(titles: Sequence[str], rows: Iterable[tuple[str, ...]]) -> RenderResult:
    """Each row as its name and, indented below, its other columns."""
    for name, *values in rows:
        yield Text(name)
        labelled = [
            f"{title} {value}" for title, value in zip(titles[1:], values, strict=True) if value
        ]
        yield Padding(Text("  ".join(labelled)), (0, 0, 0, 4))
