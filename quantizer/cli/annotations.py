"""A gate that is not met, shown at the line of the config that decided the worst layer, where GitHub Actions runs."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from quantizer.cli.options import Options
from quantizer.cli.render import workflow_command
from quantizer.printable import one_line
from quantizer.report.page.parts import most_damaged, of


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
