"""The report in the result folder: report.json, its values, and report.html, which shows
them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.errors import DAMAGE_ERRORS, ResultError
from quantizer.report.content import collect_report
from quantizer.report.page.page import page
from quantizer.results.folder import (
    ALGORITHMS_FILE,
    PLAN_FILE,
    REPORT_FILE,
    STATISTICS_FILE,
    OpenedResults,
)
from quantizer.storage.files import write_json, write_text

REPORT_PAGE = "report.html"
REPORT_INPUTS = (PLAN_FILE, STATISTICS_FILE, ALGORITHMS_FILE)
"""The files that a report is made of, beside quant_info.json."""
Commands = Mapping[str, list[str]]


def make_report(
    opened: OpenedResults,
    tested: JsonMapping,
    commands: Commands | None = None,
) -> tuple[JsonObject, str]:
    """Return the values and the page of a calibration and of a test of it.

    Args:
        opened: the calibration.
        tested: what `tables.report` returns for a test of it, or nothing.
        commands: what made the results; None for those that the folder names.

    Raises:
        ResultError: a file is missing or damaged.
    """
    try:
        text = json.dumps(collect_report(opened, tested, commands), sort_keys=True)
        # The same values as those who read the file get.
        values: JsonObject = json.loads(text)
        return values, page(values)
    except DAMAGE_ERRORS as error:
        why = (
            f"{opened.folder} has no results that a report can be made of: "
            f"{type(error).__name__}: {error}"
        )
        raise ResultError(why, help="run --quant_mode calib again") from error


def write_report(
    opened: OpenedResults,
    tested: JsonMapping | None = None,
    place: Path | None = None,
    *,
    commands: Commands | None = None,
) -> JsonObject:
    """Write report.json and report.html of a calibration, and return the values.

    Args:
        opened: the calibration. A caller that writes into its folder holds the lock, and has
            checked that the calibration is still there.
        tested: as `report_of` takes it; by default what the report in the folder has of a test.
        place: another folder to write to.
        commands: those that made the results; by default as run.json had them when they were
            opened.

    Raises:
        ResultError: a file is damaged, or cannot be written.
    """
    if tested is None:
        tested = opened.read_findings(REPORT_FILE)
    values, html = make_report(opened, tested, commands)
    folder = place or opened.folder
    write_json(folder / REPORT_FILE, opened.with_checksum(values))
    write_text(folder / REPORT_PAGE, html)
    return values
