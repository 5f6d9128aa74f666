"""The report in the result folder: report.json, its values, and report.html, which shows
them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.errors import ResultError
from quantizer.report.content import content
from quantizer.report.page.page import page
from quantizer.results.folder import ALGORITHMS, PLAN, REPORT, STATISTICS, OpenedResults
from quantizer.storage.files import write_json, write_text

VALUES, PAGE = REPORT, "report.html"
READ = (PLAN, STATISTICS, ALGORITHMS)
"""The files that a report is made of, beside quant_info.json."""


Commands = Mapping[str, list[str]]


def report_of(
    opened: OpenedResults, tested: Mapping[str, Any], commands: Commands | None = None
) -> tuple[dict[str, Any], str]:
    """The values and the page, of a calibration and of a test of it: what `tables.report` makes
    of one, or nothing.

    Raises:
        ResultError: a file is missing or damaged.
    """
    values: dict[str, Any] = json.loads(
        json.dumps(content(opened, tested, commands), sort_keys=True)
    )  # as readers find them
    try:
        return values, page(values)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = (
            f"{opened.folder} has results that no page can be made of: "
            f"{type(error).__name__}: {error}"
        )
        raise ResultError(why, help="run --quant_mode calib again") from error


def write_report(
    opened: OpenedResults,
    tested: Mapping[str, Any] | None = None,
    place: Path | None = None,
    *,
    commands: Commands | None = None,
) -> dict[str, Any]:
    """Write both about a calibration; return the values.

    Args:
        opened: the calibration. Who writes into its folder holds the lock, and has seen that it
            is still there.
        tested: as `report_of` takes it; by default what the report in the folder has of a test.
        place: another folder to write to.
        commands: those that made the results; by default as run.json had them when they were
            opened.

    Raises:
        ResultError: a file is damaged, or cannot be written.
    """
    known = opened.about(REPORT) if tested is None else tested
    values, shown = report_of(opened, known, commands)
    folder = place or opened.folder
    write_json(folder / VALUES, opened.sealed(values))
    write_text(folder / PAGE, shown)
    return values
