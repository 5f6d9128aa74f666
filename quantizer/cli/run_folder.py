"""Opens the folder that test mode writes to: the result folder, or `--report_dir`. Writes
run.json and run.log there: options, messages and outcome of a run. Only these files differ
between equal runs.

run.json also has the commands that reproduce the folder, for the report. They belong to one
calibration, identified by the checksum of quant_info.json, and have their own checksum.
Commands of another calibration, or edited ones, are dropped.
"""

import logging
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import pairwise
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch

import quantizer
from quantizer import printable
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.cli.arguments.options import RUN, TARGET_OPTIONS, Options, each_option, word_of
from quantizer.cli.arguments.places import from_start
from quantizer.cli.terminal.screen import screen
from quantizer.config.wording import first_names
from quantizer.distributed import Ranks
from quantizer.errors import QuantizerError, ResultError, UsageError
from quantizer.export.targets import EXPORTERS, FOLDER
from quantizer.graph.ir import Graph
from quantizer.nn.load import INFO_FILE
from quantizer.printable import one_line
from quantizer.report.content import write_report
from quantizer.results.folder import (
    COMMANDS_KEY,
    REPORT_FILE,
    RUN_FILE,
    OpenedResults,
    open_written,
    read_info,
)
from quantizer.results.result_set import (
    ReadOnlyError,
    locked,
    locked_as_opened,
    require_result_folder,
)
from quantizer.results.write import write_results
from quantizer.storage import process_memory
from quantizer.storage.files import read_json, sha256, write_json, write_text

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
            if (place / INFO_FILE).exists():
                raise ResultError(
                    f"{place} holds the results of a calibration",
                    help="choose another --report_dir",
                )
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
            # Only runs for a target need them
            from quantizer.export.exporter import exporter_of, require_place

            require_place(exporter_of(target), place / FOLDER / name)
        noted = stack.enter_context(log_run(place, options, ranks.world_size))
        yield place, noted


WITHOUT_EFFECT = frozenset(
    [
        "quant_mode",
        "overwrite",
        "resume",
        "json",
        "inspect",
        "debug",
        "names",
        "top",
        "memory",
        "rank_timeout",
        "for_",
        "to_",
    ]
)
"""Options that do not change results, and the mode, which comes first in a command."""
ONLY_CHECKED = {
    "calib": frozenset(["eval_data", "evaluate", "skip_len", "report_dir", TARGET_OPTIONS]),
    "test": frozenset(["config_file", "fast_finetune", "dpu_accuracy"]),
}
"""Options that a mode ignores, or only compares with the results."""


def from_here(word: str) -> str:
    """Return an absolute path inside the working directory relative to it, and other words
    unchanged.

    >>> from_here("random:8x3x32x32"), from_here(f"{Path.cwd() / 'net.py'}:small")
    ('random:8x3x32x32', 'net.py:small')
    """
    return word.removeprefix(f"{Path.cwd()}{os.sep}")


def words_of(options: Options) -> list[str]:
    """Return the command of a run, with only the options that affect its results or name their
    folder.
    """
    left_out = WITHOUT_EFFECT | ONLY_CHECKED[options.quant_mode]
    names = [name for name in RUN if name not in left_out]
    return ["quantizer", "--quant_mode", options.quant_mode, *option_words(options, names)]


def names_same_source(options: Options, command: Sequence[str]) -> bool:
    """Return whether a command of `words_of` names the same model and data."""
    named = []
    for option, value in pairwise(command):
        if option in ("--model", "--data"):
            named += [option, value]
    return named == option_words(options, ("model", "data"))


def missing_data(options: Options) -> UsageError:
    """Return the error about missing data, with those that the calibration in the folder of
    the results had, if there is one.
    """
    # Only this error needs it
    from quantizer.sources.kinds import advice_without_data

    message = "Missing option '--data'"

    try:
        command = read_info(from_start(options.output_dir)).commands.get("calib", [])
    except QuantizerError:
        command = []
    for option, value in pairwise(command):
        if option == "--data":
            place = shlex.quote(value)
            remedy = f"the run in {options.output_dir} had --data {place}: give it again"
            return UsageError(message, help=remedy)
    remedy = (
        f"give --data, or add calibration_data() to the model's file{advice_without_data()}. "
        "A config without static activations and without algorithms needs only the shape of "
        "an input: --data random:1x3x224x224, or example_input() in the model's file"
    )
    return UsageError(message, help=remedy)


def option_words(options: Options, names: Collection[str]) -> list[str]:
    """Return the options of these names that differ from their defaults."""
    words = []
    shown = [entry.name for entry in fields(Options) if entry.name in names]
    for name, default in each_option(shown):
        value = options.value_of(name)
        if value == default or value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        for single in values:
            words.append("--to" if name == "deploy" else f"--{word_of(name)}")
            if single is not True:
                words.append(from_here(str(single)))
    return words


def write_calibration(
    folder: Path,
    request: CalibrationRequest,
    state: CalibrationState,
    original: Graph,
    *,
    command: tuple[str, Sequence[str]],
    origins: Mapping[str, bytes] | None = None,
    has_next_step: bool = False,
) -> None:
    """Write the results of a calibration and its report. Warn of exports of the one before.

    Args:
        folder: of the results.
        request, state: of the calibration.
        original: the traced model.
        command: its name and its words, which the report shows.
        origins: as for `write_results`.
        has_next_step: whether the same command writes the exports anew.

    Raises:
        ResultError: the folder cannot be written.
    """
    info = folder / INFO_FILE
    before = sha256(info) if info.is_file() else None
    write_results(
        folder,
        original,
        state.calibration,
        state.solution,
        config=request.config,
        run=request.header(state),
        origins=origins,
    )
    opened = open_written(folder)
    write_report(opened, commands=remember(opened, *command))
    exports = [path.name for path in (folder / FOLDER).glob("[!.]*") if path.suffix != ".json"]
    if exports and not has_next_step and before not in (None, opened.identity):
        _logger.warning(
            "the calibration before has made %s in %s; test mode with --to writes it anew",
            first_names(sorted(exports)),
            folder / FOLDER,
        )


def remember(
    opened: OpenedResults, mode: str, words: Sequence[str], place: Path | None = None
) -> dict[str, list[str]]:
    """Add a command to those of a result folder, and write all into run.json.

    Args:
        opened: the results.
        mode: the name of the command: "calib", "test", "merge" or "retune".
        words: the command.
        place: the folder to write to; that of the results if None.

    Returns:
        The commands of these results.

    Raises:
        ResultError: the folder cannot be written.
    """
    commands = {**opened.commands, mode: list(words)}
    folder = place or opened.folder
    facts = _facts(folder)
    facts[COMMANDS_KEY] = opened.with_checksum(commands)
    write_json(folder / RUN_FILE, facts)
    return commands


def read_commands(folder: Path) -> dict[str, Any]:
    """Return the commands in run.json as its part, empty if there are none."""
    facts = _facts(folder)
    if COMMANDS_KEY not in facts:
        return {}
    return {COMMANDS_KEY: facts[COMMANDS_KEY]}


def _facts(folder: Path) -> dict[str, Any]:
    """Return the content of run.json, empty if it is missing or damaged."""
    try:
        facts = read_json(folder / RUN_FILE)
    except ResultError:
        return {}
    return facts if isinstance(facts, dict) else {}
