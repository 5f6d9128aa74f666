"""Where test mode writes what it finds: beside the calibration, to `--report_dir`, or
nowhere.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quantizer.cli import runlog
from quantizer.cli.options import Options
from quantizer.distributed import Ranks
from quantizer.errors import ResultError
from quantizer.results.folder import INFO, OpenedResults
from quantizer.results.result_set import ReadOnlyError, locked, locked_as_opened

logger = logging.getLogger(__name__)


@contextmanager
def report_place(
    opened: OpenedResults, options: Options, ranks: Ranks
) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Lock the folder that test mode writes to; of several ranks the first does that alone.

    Yields:
        The folder, and what run.json is to say besides. None where nothing can or shall be
            written.

    Raises:
        ResultError: the folder is in use, holds other results by now, or is for the results of
            another run.
    """
    folder = opened.folder
    place = Path(options.report_dir) if options.report_dir else folder
    with ExitStack() as stack:
        if not ranks.is_first:
            yield None, {}
            return
        if place.resolve() != folder.resolve():
            _require_no_results(place)
            stack.enter_context(locked(place))
        else:
            try:
                stack.enter_context(locked_as_opened(opened.files))
            except ReadOnlyError as error:
                if options.deploy:
                    help_ = "add --report_dir DIR: exports go there, too"
                    raise ResultError(error.message, help=help_) from error
                text = "%s, so no report is written: --report_dir DIR writes it elsewhere"
                logger.warning(text, error.message)
                yield None, {}
                return
        noted = stack.enter_context(runlog.recorded(place, options, ranks.world_size))
        yield place, noted


def _require_no_results(place: Path) -> None:
    """Refuse to write a report among results that it is not about.

    Raises:
        ResultError: the folder holds a calibration.
    """
    if (place / INFO).exists():
        help_ = "choose another --report_dir"
        raise ResultError(f"{place} holds the results of a calibration", help=help_)
