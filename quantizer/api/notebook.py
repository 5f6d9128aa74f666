"""Shows tables and progress in notebooks. Elsewhere progress is logged."""

import sys
import time
from typing import Any

from quantizer.api.python_words import PythonEvents
from quantizer.calibration.events import Events, LoggedEvents, RunStage
from quantizer.config.wording import a_kind
from quantizer.errors import UsageError
from quantizer.printable import Markup, element
from quantizer.report.view import Listing

_SECONDS_BETWEEN_DRAWINGS = 0.1


def follower(events: Events | None = None) -> Events:
    """Return what shows a run: the user's `events`, bars and log records in a notebook, or log
    records. Messages name arguments of Python.
    """
    if events is not None and hasattr(events, "started"):
        return PythonEvents(events)
    if events is not None:
        raise UsageError(
            f"events is {a_kind(events)}, not a quantizer.calibration.events.Events",
            help="write a subclass of it, with its method `message` for example",
        )
    if in_notebook():
        return PythonEvents(NotebookBars(), LoggedEvents())
    return PythonEvents(LoggedEvents())


class NotebookBars(Events):
    """Shows a bar for each stage of a run while it lasts. It needs only IPython."""

    def __init__(self) -> None:
        self._stages: list[RunStage] = []
        self._display: Any = None
        self._drawn = 0.0

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        self._stages.append(stage)
        self._draw()

    def advanced(self, stage: RunStage) -> None:
        """Update the bar, at most every tenth of a second."""
        if time.monotonic() - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw()

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Remove the bar."""
        self._stages.remove(stage)
        self._draw()

    def _draw(self) -> None:
        ipython = sys.modules["IPython.display"]
        bars = "".join(map(_bar, self._stages))
        content = ipython.HTML(bars)
        if self._display is None:
            self._display = ipython.display(content, display_id=True)
        else:
            self._display.update(content)
        self._drawn = time.monotonic()


def _bar(stage: RunStage) -> Markup:
    count = str(stage.done)
    bar = element("progress", value=None, max=None)
    if stage.total:
        count += f"/{stage.total}"
        bar = element("progress", value=stage.done, max=stage.total)
    return element("div", f"{stage.name} ", bar, f" {count} {stage.unit}")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    module: Any = sys.modules.get("IPython")
    if module is None:
        return False
    shell = module.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def html_table(listing: Listing) -> Markup:
    """Return an HTML table with all columns."""
    head = element("thead", _row("th", listing.widest, listing))
    rows = []
    for row in listing.rows_of(listing.widest):
        rows.append(_row("td", row, listing))
    return element("table", head, element("tbody", rows))


def _row(tag: str, values: tuple[str, ...], listing: Listing) -> Markup:
    cells = []
    for text, title in zip(values, listing.widest, strict=True):
        side = "right" if title in listing.numbers else "left"
        cells.append(element(tag, text, style=f"text-align:{side}"))
    return element("tr", cells)
