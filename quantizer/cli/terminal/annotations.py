"""In GitHub Actions, annotates lines of the config with the results of a test, and writes the
summary of the job.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantizer.cli.arguments.options import Options
from quantizer.cli.terminal.render import workflow_command
from quantizer.evaluation.output_warnings import NOTES
from quantizer.printable import one_line
from quantizer.report.rows import layer_name, measured_lines, most_damaged, tensor_name
from quantizer.report.tables import number_text

_MAX_ROWS = 10
_ESCAPES = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "\\`*[]|~"},
        **{sign: f"&#{ord(sign)};" for sign in "<&@"},
    }
)
"""How Markdown shows the signs of its own syntax, of HTML and of mentions."""


def annotate(options: Options, not_met: Sequence[str], values: dict[str, Any]) -> None:
    """Print a workflow command about gates that do not hold.

    Args:
        options: of the run.
        not_met: the gates.
        values: those of report.json; none in float mode.
    """
    text = f"not met: {', '.join(not_met)}"
    properties: dict[str, str] = {}
    worst = most_damaged(values["layers"]) if values else None
    if worst is not None:
        text += f"; {tensor_name(values, worst)} loses most, {worst['local_sqnr_db']:.1f} dB"
        properties = _place(options, values, worst)
    _command("error", properties, text)


def annotate_warnings(options: Options, values: dict[str, Any]) -> None:
    """Print a workflow command about each output that has lost, at the line of the tensor that
    causes the loss.

    Args:
        options: of the run.
        values: those of report.json.
    """
    rows = {}
    for row in values["layers"]:
        rows[row["layer"], row["tensor"]] = row
    for warning in values["warnings"]:
        if warning["kind"] in NOTES:
            continue
        key = (warning["layer"], warning["tensor"])
        place: dict[str, str] = {}
        if key in rows:
            place = _place(options, values, rows[key])
        _command("warning", place, warning["text"])


def _place(
    options: Options, values: Mapping[str, Any], row: Mapping[str, Any]
) -> dict[str, str]:
    """Return file and line of the config that decide most about a tensor, if there is one."""
    if row["line"] is None:
        return {}
    file = options.config_file or values["config"]["name"]
    return {"file": file, "line": str(row["line"])}


def _command(kind: str, properties: Mapping[str, str], text: str) -> None:
    """Print a workflow command; Actions reads standard error too."""
    properties = {**properties, "title": "quantizer"}
    command = workflow_command(kind, properties, one_line(text))
    print(command, file=sys.stderr)


def append_summary(path: str, report: dict[str, Any], gates: Sequence[str]) -> None:
    """Append figures, gates and the most damaged tensors to the job summary.

    Args:
        path: of its file.
        report: the values of report.json.
        gates: a line for each gate.
    """
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
