"""Annotates lines of the config with the results of a test, in GitHub Actions."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quantizer.cli.options import Options
from quantizer.evaluation.output_warnings import NOTES
from quantizer.printable import one_line
from quantizer.report.page.rows import most_damaged, tensor_name


def annotate(options: Options, not_met: Sequence[str], values: dict[str, Any]) -> None:
    """Print a workflow command about gates that do not hold.

    Args:
        options: of the run.
        not_met: the gates.
        values: those of report.json; none in float mode.
    """
    if not _is_in_actions():
        return
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
    if not _is_in_actions():
        return
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


def _is_in_actions() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


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
    # Only GitHub Actions need it
    from quantizer.cli.render import workflow_command

    properties = {**properties, "title": "quantizer"}
    command = workflow_command(kind, properties, one_line(text))
    print(command, file=sys.stderr)
