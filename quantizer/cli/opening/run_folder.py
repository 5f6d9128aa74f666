"""Opens the folder that test mode writes to: the result folder, or `--report_dir`. Writes
run.json and run.log there: options, messages and outcome of a run. Only these files differ
between equal runs.
"""

import logging
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

import quantizer
from quantizer import printable
from quantizer.cli.arguments.options import RUN, Options, each_option, word_of
from quantizer.cli.arguments.places import from_start
from quantizer.cli.arguments.reproduction import read_commands
from quantizer.cli.terminal.screen import screen
from quantizer.distributed import Ranks
from quantizer.errors import QuantizerError, ResultError
from quantizer.export.targets import EXPORTERS, FOLDER
from quantizer.printable import one_line
from quantizer.results.folder import INFO_FILE, REPORT_FILE, RUN_FILE, OpenedResults
from quantizer.results.result_set import (
    ReadOnlyError,
    locked,
    locked_as_opened,
    require_result_folder,
)
from quantizer.storage import process_memory
from quantizer.storage.files import write_json, write_text

_IMPORTS = process_memory.peak_bytes()
"""The memory that torch and the modules of a run take, in bytes."""


_FILES = (REPORT_FILE, "report.html", "layers.csv", RUN_FILE, "run.log")
_logger = logging.getLogger(__name__)


@contextmanager
def log_run(folder: Path, options: Options, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Write both files when the body ends, also if it fails.

    Yields:
        Further entries of run.json, to fill in.
    """
    noted: dict[str, Any] = {}
    started = time.time()
    outcome = "done"
    log = ""
    messages = BufferingHandler(sys.maxsize)
    logging.getLogger("quantizer").addHandler(messages)
    try:
        yield noted
    except QuantizerError as error:
        outcome = f"{type(error).__name__}: {error.message}"
        log = f"error: {error.message}\nhelp: {error.help}\n"
        raise
    except BaseException as error:
        outcome = type(error).__name__
        log = traceback.format_exc()
        raise
    finally:
        logging.getLogger("quantizer").removeHandler(messages)
        peak = process_memory.peak_bytes()
        over_imports = peak - _IMPORTS if peak and _IMPORTS else None
        facts = {
            "options": {word_of(name): options.value_of(name) for name, _ in each_option(RUN)},
            "argv": sys.argv[1:],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 3),
            "peak_memory_bytes": peak,
            "peak_memory_over_imports_bytes": over_imports,
            "outcome": outcome,
            "quantizer": quantizer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "ranks": ranks,
            **noted,
            **read_commands(folder),
        }
        write_json(folder / RUN_FILE, facts)
        text = one_line(f"{facts['started']} quantizer {' '.join(sys.argv[1:])}") + "\n"
        lines = [record.getMessage() for record in messages.buffer]
        # Those of steps that have no file of their own
        earlier = [line for line in screen().left_out if line not in lines]
        for line in [*dict.fromkeys(earlier), *lines]:
            text += one_line(line) + "\n"
        text += printable.printable_lines(log) + one_line(outcome) + "\n"
        write_text(folder / "run.log", text)


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
        noted = stack.enter_context(log_run(place, options, ranks.world_size))
        yield place, noted


def _require_no_results(place: Path) -> None:
    """Raise `ResultError` if a folder holds the results of another calibration."""
    if (place / INFO_FILE).exists():
        raise ResultError(
            f"{place} holds the results of a calibration", help="choose another --report_dir"
        )
