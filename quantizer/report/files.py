"""The report in the result folder: report.json, its values, and report.html, which shows them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.engine.result_files import read_json, write_bytes, write_json
from quantizer.report.content import content
from quantizer.report.page.page import page

VALUES, PAGE = "report.json", "report.html"


def write_report(folder: Path, tested: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write both, of a calibration and of what test mode found of it; return the values.

    Args:
        folder: of a complete calibration.
        tested: what `tables.report` makes of a test; by default what the report in the folder has of one.

    Raises:
        ResultError: a file is missing, damaged, or cannot be written.
    """
    write_json(folder / VALUES, content(folder, tested))
    found: dict[str, Any] = read_json(folder / VALUES)  # in the order that any reader finds
    write_bytes(folder / PAGE, page(found).encode())
    return found
