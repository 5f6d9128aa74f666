"""What a notebook shows: tables as HTML, and progress as bars. Elsewhere a run reports to the
log.
"""

import sys
import time
from typing import Any

from quantizer.calibration.events import Events, Forked, Logged, Stage
from quantizer.report.page.html import Markup, element
from quantizer.report.view import Listing

REDRAW_S = 0.1


def follower() -> Events:
    """Bars and log records in a notebook, log records elsewhere."""
    return Forked(NotebookBars(), Logged()) if in_notebook() else Logged()


class NotebookBars(Events):
    """Shows each stage of a run as a bar, which vanishes at its end; IPython alone is enough
    for it.
    """

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._display: Any = None
        self._drawn = 0.0

    def started(self, stage: Stage) -> None:
        """Show a bar."""
        self._stages.append(stage)
        self._draw()

    def advanced(self, stage: Stage) -> None:
        """Move it, but not so often that drawing takes time."""
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def stopped(self, stage: Stage, error: BaseException | None) -> None:
        """Take it away."""
        self._stages.remove(stage)
        self._draw()

    def _draw(self) -> None:
        ipython = sys.modules["IPython.display"]
        content = ipython.HTML("".join(map(_bar, self._stages)))
        if self._display is None:
            self._display = ipython.display(content, display_id=True)
        else:
            self._display.update(content)
        self._drawn = time.monotonic()


def _bar(stage: Stage) -> Markup:
    bar = element(
        "progress", value=stage.done if stage.total else None, max=stage.total or None
    )
    count = f"{stage.done}/{stage.total}" if stage.total else str(stage.done)
    return element("div", f"{stage.name} ", bar, f" {count} {stage.unit}")


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module: Any = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def html_table(listing: Listing) -> Markup:
    """An HTML table of the same rows in the widest layout."""
    rows = [_row("td", row, listing) for row in listing.rows_of(listing.widest)]
    return element(
        "table", element("thead", _row("th", listing.widest, listing)), element("tbody", rows)
    )


def _row(tag: str, values: tuple[str, ...], listing: Listing) -> Markup:
    sides = ("right" if title in listing.numbers else "left" for title in listing.widest)
    cells = [
        element(tag, text, style=f"text-align:{side}")
        for text, side in zip(values, sides, strict=True)
    ]
    return element("tr", cells)
