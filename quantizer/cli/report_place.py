"""Opens the folder that test mode writes to: the result folder, or `--report_dir`."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quantizer.cli import runlog
from quantizer.cli.options import Options
from quantizer.cli.start_folder import from_start
from quantizer.distributed import Ranks
from quantizer.errors import ResultError
from quantizer.export.targets import EXPORTERS, FOLDER
from quantizer.results.folder import INFO_FILE, REPORT_FILE, RUN_FILE, OpenedResults
from quantizer.results.result_set import (
    ReadOnlyError,
    locked,
    locked_as_opened,
    require_result_folder,
)

_FILES = (REPORT_FILE, "report.html", "layers.csv", RUN_FILE, "run.log")
_logger = logging.getLogger(__name__)


@contextmanager
def report_place(
    opened: OpenedResults, options: Options, ranks: Ranks
) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Lock the folder that test mode writes to, on the first rank only.

    Yields:
        The folder, or None if nothing is written; and further entries of run.json.

    Raises:
        ResultError: the folder is in use, was replaced meanwhile, or holds another calibration.
    """
    folder = opened.folder
    place = from_start(options.report_dir) if options.report_dir else folder
    require_result_folder(place)
    with ExitStack() as stack:
        if not ranks.is_first:
            yield None, {}
            return
        if place.resolve() != folder.resolve():
            _require_no_results(place)
            owned = stack.enter_context(locked(place))
        else:
            try:
                owned = stack.enter_context(locked_as_opened(opened.files))
            except ReadOnlyError as error:
                if options.deploy:
                    remedy = "add --report_dir DIR: exports are written there too"
                    raise ResultError(error.message, help=remedy) from error
                text = "%s, so no report is written; --report_dir DIR writes it elsewhere"
                _logger.warning(text, error.message)
                yield None, {}
                return
        owned.require_ours(*_FILES)
        for target in options.deploy:
            owned.require_folder(FOLDER)
            name = f"{opened.header['model']}{EXPORTERS[target].suffix}"
            # Only --deploy needs them
            from quantizer.export.exporting import exporter_of
            from quantizer.export.publishing import require_place

            require_place(exporter_of(target), place / FOLDER / name)
        noted = stack.enter_context(runlog.log_run(place, options, ranks.world_size))
        yield place, noted


def _require_no_results(place: Path) -> None:
    """Raise `ResultError` if a folder holds the results of another calibration."""
    if (place / INFO_FILE).exists():
        raise ResultError(
            f"{place} holds the results of a calibration", help="choose another --report_dir"
        )
