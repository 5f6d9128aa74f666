"""What a notebook shows: tables as HTML, and progress as bars. Elsewhere a run reports to the log."""

import html
import sys
from typing import Any

from rich.console import Console

from quantizer.engine.events import Events, Forked, Logged
from quantizer.report.bars import Bars
from quantizer.report.view import Listing


def follower() -> Events:
    """Bars and log records in a notebook, log records elsewhere."""
    return Forked(Bars(Console()), Logged()) if in_notebook() else Logged()


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
