"""What a test found, shown at the lines of the config that decided it, where GitHub Actions
runs."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quantizer.cli.options import Options
from quantizer.cli.render import workflow_command
from quantizer.printable import one_line
from quantizer.report.page.rows import most_damaged, tensor_name

TITLE = {"title": "quantizer"}


def annotate(options: Options, not_met: Sequence[str], values: dict[str, Any]) -> None:
    """Print a workflow command on gates that are not met; Actions reads stderr as it does
    stdout.

    Args:
        values: those of report.json; none in float mode.
    """
    if not _is_in_actions():
        return
    text = f"not met: {', '.join(not_met)}"
    worst = most_damaged(values["layers"]) if values else None
    properties: dict[str, str] = {}
    if worst is not None:
        text += f"; {tensor_name(values, worst)} loses most, {worst['local_sqnr_db']:.1f} dB"
        properties = _place(options, values, worst)
    _command("error", properties, text)


def annotate_warnings(options: Options, values: dict[str, Any]) -> None:
    """Print a workflow command on each output that has lost, at the line about the tensor
    that is to blame.

    Args:
        values: those of report.json.
    """
    if not _is_in_actions():
        return
    rows = {(row["layer"], row["tensor"]): row for row in values["layers"]}
    for warning in values["warnings"]:
        if warning["kind"] != "rows":
            row = rows.get((warning["layer"], warning["tensor"]))
            place = {} if row is None else _place(options, values, row)
            _command("warning", place, warning["text"])


def _is_in_actions() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


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
    print(workflow_command(kind, {**properties, **TITLE}, one_line(text)), file=sys.stderr)
