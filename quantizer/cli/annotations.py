"""What a test found, shown at the lines of the config that decided it, where GitHub Actions
runs."""

import os
import sys
<<<<<<< HEAD
from collections.abc import Mapping, Sequence
from pathlib import Path
=======
from collections.abc import Sequence
>>>>>>> main
from typing import Any

from quantizer.cli.options import Options
from quantizer.cli.render import workflow_command
from quantizer.printable import one_line
from quantizer.report.page.parts import most_damaged, of

TITLE = {"title": "quantizer"}


<<<<<<< HEAD
def annotate(options: Options, not_met: Sequence[str]) -> None:
    """Print a workflow command on gates that are not met; Actions reads stderr as it does
    stdout."""
    if not _is_in_actions():
        return
    values = _values(options)
    text = f"not met: {', '.join(not_met)}"
    worst = most_damaged(values["layers"]) if options.quant_mode == "test" else None
    properties: dict[str, str] = {}
    if worst is not None:
        text += f"; {of(values, worst)} loses most, {worst['local_sqnr_db']:.1f} dB"
        properties = _place(options, values, worst)
    _command("error", properties, text)


def annotate_warnings(options: Options, warnings: Sequence[Mapping[str, str]]) -> None:
    """Print a workflow command on each output that has lost, at the line about the tensor
    that is to blame."""
    if not _is_in_actions():
        return
    values = _values(options)
    rows = {(row["layer"], row["tensor"]): row for row in values["layers"]}
    for warning in warnings:
        if warning["kind"] != "rows":
            row = rows.get((warning["layer"], warning["tensor"]))
            place = {} if row is None else _place(options, values, row)
            _command("warning", place, warning["text"])


def _is_in_actions() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _values(options: Options) -> Any:
    """Return the values of the report."""
    try:
        return read_json(Path(options.output_dir) / VALUES)
    except ResultError:  # float mode writes none
        return {"layers": [], "config": None}


def _place(
    options: Options,
    values: Mapping[str, Any],
    row: Mapping[str, Any],
) -> dict[str, str]:
    """Return the line of the config that says most about a tensor, if one does."""
    if row["line"] is None:
        return {}
    return {"file": options.config_file or values["config"]["name"], "line": str(row["line"])}


def _command(kind: str, properties: Mapping[str, str], text: str) -> None:
    print(workflow_command(kind, {**properties, **TITLE}, text), file=sys.stderr)
=======
def annotate(options: Options, not_met: Sequence[str], values: dict[str, Any]) -> None:
    """Print a workflow command on stderr, which Actions reads as it does stdout; elsewhere do nothing.

    Args:
        values: those of report.json; none in float mode.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    text, properties = f"not met: {', '.join(not_met)}", dict[str, str]()
    worst = most_damaged(values["layers"]) if values else None
    if worst is not None:
        text += f"; {of(values, worst)} loses most, {worst['local_sqnr_db']:.1f} dB"
        if worst["line"] is not None:
            file = options.config_file or values["config"]["name"]
            properties = {"file": file, "line": str(worst["line"])}
    print(workflow_command("error", properties | {"title": "quantizer"}, one_line(text)), file=sys.stderr)
>>>>>>> main
