"""Stores in run.json the commands that reproduce a result folder, for the report.

They belong to one calibration, identified by the checksum of quant_info.json, and have their
own checksum. Commands of another calibration, or edited ones, are dropped.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantizer.cli.arguments.options import RUN, Options, each_option, word_of
from quantizer.errors import ResultError
from quantizer.report.next_step import DATA_OPTIONS
from quantizer.results.folder import COMMANDS_KEY, RUN_FILE, OpenedResults
from quantizer.storage.files import read_json, write_json

WITHOUT_EFFECT = frozenset(
    [
        "quant_mode",
        "output_dir",
        "report_dir",
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
    ]
)
"""Options that do not change results, and the mode, which comes first in a command."""
ONLY_CHECKED = {
    "calib": frozenset(["eval_data", "evaluate", "skip_len"]),
    "test": frozenset(["config_file", "fast_finetune", "dpu_accuracy"]),
}
"""Options that a mode ignores, or only compares with the results."""


def without_folders(word: str) -> str:
    """Return an absolute path relative to the working directory, or only its name if it is
    outside. Return other words unchanged.

    >>> without_folders("net.json"), without_folders("random:8x3x32x32")
    ('net.json', 'random:8x3x32x32')
    >>> without_folders("/nowhere/here/net.py:small")
    'net.py:small'
    """
    if not os.path.isabs(word):
        return word
    path = Path(word)
    here = Path.cwd()
    if path.is_relative_to(here):
        return str(path.relative_to(here))
    return path.name


def words_of(options: Options) -> list[str]:
    """Return the command of a run, with only the options that affect its results.

    It has no absolute paths: see `without_folders`.
    """
    left_out = WITHOUT_EFFECT | ONLY_CHECKED[options.quant_mode]
    names = [name for name in RUN if name not in left_out]
    return ["quantizer", "--quant_mode", options.quant_mode, *option_words(options, names)]


def data_options(options: Options) -> dict[str, list[str]]:
    """Return the values of the options about the model's data, for another command in the same
    folder.
    """
    values = {}
    for name in DATA_OPTIONS:
        words = option_words(options, (name,), path_text=str)
        if words:
            values[name] = words[1:]
    return values


def names_same_source(options: Options, command: Sequence[str]) -> bool:
    """Return whether a command of `words_of` names the same model and data."""
    named = []
    for option, value in pairwise(command):
        if option in ("--model", "--data"):
            named += [option, value]
    return named == option_words(options, ("model", "data"))


def option_words(
    options: Options, names: Collection[str], path_text: Callable[[str], str] = without_folders
) -> list[str]:
    """Return the options of these names that differ from their defaults."""
    words = []
    shown = [entry.name for entry in fields(Options) if entry.name in names]
    for name, default in each_option(shown):
        value = options.value_of(name)
        if value == default or value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        for single in values:
            words.append(f"--{word_of(name)}")
            if single is not True:
                words.append(path_text(str(single)))
    return words


def remember(
    opened: OpenedResults, mode: str, words: Sequence[str], place: Path | None = None
) -> dict[str, list[str]]:
    """Add a command to those of a result folder, and write all into run.json.

    Args:
        opened: the results.
        mode: the name of the command: "calib", "test" or "merge".
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
