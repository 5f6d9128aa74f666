"""A gate that is not met, shown at the line of the config that decided the worst layer, where GitHub Actions runs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quantizer.cli.options import Options
from quantizer.cli.render import workflow_command
from quantizer.engine.result_files import read_json
from quantizer.errors import ResultError
from quantizer.printable import one_line
from quantizer.report.files import VALUES
from quantizer.report.page.parts import most_damaged, of


def annotate(options: Options, not_met: Sequence[str]) -> None:
    """Print a workflow command on stderr, which Actions reads as it does stdout; elsewhere do nothing."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    try:
        values = read_json(Path(options.output_dir) / VALUES)
    except ResultError:  # float mode writes none
        values = {"layers": [], "config": None}
    text, properties = f"not met: {', '.join(not_met)}", dict[str, str]()
    worst = most_damaged(values["layers"]) if options.quant_mode == "test" else None
    if worst is not None:
        text += f"; {of(values, worst)} loses most, {worst['local_sqnr_db']:.1f} dB"
        if worst["line"] is not None:
            file = options.config_file or values["config"]["name"]
            properties = {"file": file, "line": str(worst["line"])}
    print(workflow_command("error", properties | {"title": "quantizer"}, one_line(text)), file=sys.stderr)
