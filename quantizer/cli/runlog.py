"""run.json and run.log: how a run began, what it reported, how it ended; alone they differ
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
from quantizer.cli.options import RUN, Options, word_of
from quantizer.cli.reproduction import remembered
from quantizer.errors import QuantizerError
from quantizer.printable import one_line
from quantizer.results.folder import RUN_FILE
from quantizer.storage import process_memory
from quantizer.storage.files import write_json, write_text

_IMPORTS = process_memory.peak()
"""What torch and the modules of a run have taken."""


@contextmanager
def recorded(folder: Path, options: Options, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Write both files when the body ends, in whatever way it ends; gives what is to be in
    run.json besides.
    """
    noted: dict[str, Any] = {}
    started = time.time()
    outcome, log = "done", ""
    messages = BufferingHandler(sys.maxsize)
    logging.getLogger("quantizer").addHandler(messages)
    try:
        yield noted
    except QuantizerError as error:
        outcome, log = (
            f"{type(error).__name__}: {error.message}",
            f"error: {error.message}\nhelp: {error.help}\n",
        )
        raise
    except BaseException as error:
        outcome, log = type(error).__name__, traceback.format_exc()
        raise
    finally:
        logging.getLogger("quantizer").removeHandler(messages)
        most = process_memory.peak()
        facts = {
            "options": {word_of(name): getattr(options, name) for name in RUN},
            "argv": sys.argv[1:],
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 3),
            "peak_memory_bytes": most,
            "peak_memory_over_imports_bytes": most - _IMPORTS if most and _IMPORTS else None,
            "outcome": outcome,
            "quantizer": quantizer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "ranks": ranks,
            **noted,
            **remembered(folder),
        }
        write_json(folder / RUN_FILE, facts)
        notes = [f"{one_line(record.getMessage())}\n" for record in messages.buffer]
        began = one_line(f"{facts['started']} quantizer {' '.join(sys.argv[1:])}") + "\n"
        text = "".join([began, *notes, printable.lines(log), one_line(outcome), "\n"])
        write_text(folder / "run.log", text)
