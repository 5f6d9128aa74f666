"""Writes the result of a test into the job summary of GitHub Actions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantizer.printable import one_line
from quantizer.report.page.rows import layer_name
from quantizer.report.tables import number_text
from quantizer.report.verdict import measured_lines

_VARIABLE = "GITHUB_STEP_SUMMARY"
"""The environment variable with the file that Actions shows."""
_MAX_ROWS = 10
_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "\\`*[]|~"},
        **{sign: f"&#{ord(sign)};" for sign in "<&@"},
    }
)
"""How Markdown shows the signs of its own syntax, of HTML and of mentions."""


def append_summary(report: dict[str, Any], gates: Sequence[str]) -> None:
    """Append figures, gates and the most damaged tensors to the job summary, if there is one.

    Args:
        report: the values of report.json.
        gates: a line for each gate.
    """
    path = os.environ.get(_VARIABLE)
    if not path or "metrics" not in report:
        return
    lines = [f"### quantizer: {_text(report['model'])}", ""]
    for text in (*measured_lines(report), *gates):
        lines.append(f"- {_text(text)}")
    lines += ["", "| tensor | quantized as | local dB | accumulated dB |", "|---|---|--:|--:|"]
    for row in report["layers"][:_MAX_ROWS]:
        cells = [
            f"{_text(row['tensor'])} of `{_cell(layer_name(report, row['layer']))}`",
            _text(row["spec"]),
            number_text(row["local_sqnr_db"], ".1f"),
            number_text(row["accumulated_sqnr_db"], ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    more = len(report["layers"]) - _MAX_ROWS
    if more > 0:
        lines.append(f"\n{more} more are in layers.csv and report.html.")
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _text(text: str) -> str:
    r"""Return a text as Markdown shows it. A metric may have any name.

    >>> print(_text("<b> of [a](http://b.c) is 1"))
    &#60;b> of \[a\](http&#58;//b.c) is 1
    """
    escaped = one_line(text).translate(_ESCAPES)
    # Addresses become links without any other sign
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;")


def _cell(name: str) -> str:
    return one_line(name).replace("|", "\\|").replace("`", "'")
