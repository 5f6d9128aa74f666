"""The report in the result folder: report.json, its values, and report.html, which shows them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.engine.result_files import write_json, write_text
from quantizer.engine.stored_checks import checked_json
from quantizer.errors import ResultError
from quantizer.report.content import content
from quantizer.report.page.page import page

VALUES, PAGE = "report.json", "report.html"


def report_of(folder: Path, tested: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The values and the page, of a calibration and of a test of it: what `tables.report` makes of one, or nothing.

    Raises:
        ResultError: a file is missing or damaged.
    """
    values: dict[str, Any] = json.loads(json.dumps(content(folder, tested), sort_keys=True))  # as readers find them
    try:
        return values, page(values)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{folder} has results that no page can be made of: {type(error).__name__}: {error}"
        raise ResultError(why, help="run --quant_mode calib again") from error


def write_report(folder: Path, tested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write both into the folder of a complete calibration; return the values.

    Args:
        folder: where it is.
        tested: as `report_of` takes it; by default what the report in the folder has of a test.

    Raises:
        ResultError: a file is missing, damaged, or cannot be written.
    """
    if tested is None:
        tested = checked_json(folder / VALUES) if (folder / VALUES).exists() else {}
    values, shown = report_of(folder, tested)
    write_json(folder / VALUES, values)
    write_text(folder / PAGE, shown)
    return values
