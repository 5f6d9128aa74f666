"""Writes run.json and run.log: options, messages and outcome of a run. Only these files differ
between equal runs.
"""

import logging
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

import quantizer
from quantizer import printable
from quantizer.cli.options import RUN, Options, each_option, word_of
from quantizer.cli.reproduction import read_commands
from quantizer.cli.screen import screen
from quantizer.errors import QuantizerError
from quantizer.printable import one_line
from quantizer.results.folder import RUN_FILE
from quantizer.storage import process_memory
from quantizer.storage.files import write_json, write_text

_IMPORTS = process_memory.peak_bytes()
"""The memory that torch and the modules of a run take, in bytes."""


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
