"""Write the report of a result folder: report.json with values, and report.html, which shows
them if a plug-in is there that makes the page.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.errors import DAMAGE_ERRORS, ResultError, UsageError
from quantizer.plugins import loaded, plugins, remedy_for_absent
from quantizer.report.content import collect_report
from quantizer.results.folder import REPORT_FILE, OpenedResults
from quantizer.storage.files import write_json, write_text

REPORT_PAGE = "report.html"
Commands = Mapping[str, list[str]]


def make_report(
    opened: OpenedResults, tested: JsonMapping, commands: Commands | None = None
) -> tuple[JsonObject, str]:
    """Return the content of report.json, and of report.html, which is empty without a plug-in
    that makes it.

    Args:
        opened: the calibration.
        tested: what `tables.report_values` returns for a test of it, or an empty dict.
        commands: the commands that made the results, by mode. By default those of run.json.

    Raises:
        ResultError: a file is missing or damaged.
    """
    try:
        text = json.dumps(collect_report(opened, tested, commands), sort_keys=True)
        # The page must be the same when it is made from report.json later
        values: JsonObject = json.loads(text)
        return values, _page(values)
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
    """Write the report of a calibration, and return the values of report.json.

    Args:
        opened: the calibration. To write into its folder, the caller must hold the lock and
            have checked that the calibration was not replaced.
        tested: the figures of a test, as for `make_report`. By default those of the report that
            is already in the folder.
        place: the folder to write to. By default that of the calibration.
        commands: as for `make_report`.

    Raises:
        ResultError: a file is damaged, or cannot be written.
    """
    if tested is None:
        tested = opened.read_findings(REPORT_FILE)
    values, html = make_report(opened, tested, commands)
    _write(opened, values, html, place or opened.folder)
    return values


def add_to_report(
    opened: OpenedResults, values: JsonMapping, added: JsonMapping, folder: Path
) -> JsonObject:
    """Write a report again with further values, and return all values.

    Args:
        opened: as for `write_report`.
        values: of the report that `write_report` has just written.
        added: replace those of the same name.
        folder: with the report.

    Raises:
        ResultError: the report cannot be written.
    """
    whole: JsonObject = json.loads(json.dumps({**values, **added}, sort_keys=True))
    _write(opened, whole, _page(whole), folder)
    return whole


def _write(opened: OpenedResults, values: JsonMapping, html: str, folder: Path) -> None:
    write_json(folder / REPORT_FILE, opened.with_checksum(values))
    if html:
        write_text(folder / REPORT_PAGE, html)


def _page(values: JsonMapping) -> str:
    page = _function("page")
    return "" if page is None else str(page(values))


def _function(name: str) -> Any:
    """Return what a plug-in has for reports by this name; None if none has it."""
    places = {name: place for plugin in plugins() for name, place in plugin.report.items()}
    return loaded(places[name]) if name in places else None


def shown_by_plugin(name: str) -> Any:
    """Return the function of a plug-in that shows reports, as `Plugin.report` has it.

    Raises:
        UsageError: no plug-in has one.
    """
    function = _function(name)
    if function is None:
        why = f"no plug-in is there that makes the {name} of a report"
        raise UsageError(why, help=remedy_for_absent("page"))
    return function
