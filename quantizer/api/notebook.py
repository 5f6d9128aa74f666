"""What a notebook shows: tables as HTML, and progress as bars. Elsewhere a run reports to the log."""

import html
import sys
import time
from typing import Any

from quantizer.engine.events import Events, Forked, Logged, Stage
from quantizer.report.view import Listing

REDRAW_S = 0.1


def follower() -> Events:
    """Bars and log records in a notebook, log records elsewhere."""
    return Forked(NotebookBars(), Logged()) if in_notebook() else Logged()


class NotebookBars(Events):
    """Shows each stage of a run as a bar, which vanishes at its end; IPython alone is enough for it."""

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


def _bar(stage: Stage) -> str:
    limits = f' value="{stage.done}" max="{stage.total}"' if stage.total else ""
    count = f"{stage.done}/{stage.total}" if stage.total else str(stage.done)
    return f"<div>{html.escape(stage.name)} <progress{limits}></progress> {count} {html.escape(stage.unit)}</div>"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module: Any = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def html_table(listing: Listing) -> str:
    """An HTML table of the same rows in the widest layout; all text is escaped."""
    head = _row("th", listing.widest, listing)
    body = "".join(_row("td", row, listing) for row in listing.rows_of(listing.widest))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _row(tag: str, values: tuple[str, ...], listing: Listing) -> str:
    cells = []
    for title, text in zip(listing.widest, values, strict=True):
        side = "right" if title in listing.numbers else "left"
        cells.append(f'<{tag} style="text-align:{side}">{html.escape(text)}</{tag}>')
    return f"<tr>{''.join(cells)}</tr>"
