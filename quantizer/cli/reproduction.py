"""Keeps in run.json the commands that make a result folder again, for the report.

They belong to one calibration, which they name by the checksum of quant_info.json, and have a
checksum of their own. Commands of another calibration are dropped, and so are edited ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from quantizer.cli.options import RUN, Options, word_of
from quantizer.errors import ResultError
from quantizer.results.folder import COMMANDS, RUN_FILE, OpenedResults
from quantizer.storage.files import read_json, write_json

CHANGES_NOTHING = frozenset(
    [
        *(
            "quant_mode",
            "output_dir",
            "report_dir",
            "overwrite",
            "resume",
            "json",
            "quiet",
            "inspect",
        ),
        *("debug", "names", "top", "memory", "rank_timeout", "for_"),
    ]
)
"""Options that the results do not depend on, and the mode, which stands first in a command."""
MERGED = ("model", "weights", "trust")
"""Options that a merge depends on."""
ONLY_CHECKED = {
    "calib": frozenset(["eval_data", "evaluate"]),
    "test": frozenset(["config_file", "fast_finetune", "dpu_accuracy"]),
}
"""Options that a mode does not read, or only compares with the results."""


def words_of(options: Options) -> list[str]:
    """Return the command of a run, with every option that decides its results and no other.

    Results hold no absolute paths: see `without_folders`.
    """
    left_out = CHANGES_NOTHING | ONLY_CHECKED[options.quant_mode]
    names = [name for name in RUN if name not in left_out]
    return ["quantizer", "--quant_mode", options.quant_mode, *_option_words(options, names)]


def words_of_merge(options: Options, places: Sequence[Path]) -> list[str]:
    """Return the command that merges some folders, as `words_of` returns that of a run."""
    folders = [without_folders(str(place)) for place in places]
    return ["quantizer", "merge", *folders, *_option_words(options, MERGED)]


def _option_words(options: Options, names: Collection[str]) -> list[str]:
    """The options of these names that are not as by default."""
    words = []
    for option in fields(Options):
        if option.name not in names:
            continue
        value = getattr(options, option.name)
        if value == option.default or value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        for single in values:
            words.append(f"--{word_of(option.name)}")
            if single is not True:
                words.append(without_folders(str(single)))
    return words


def without_folders(word: str) -> str:
    """Return an absolute path relative to the working directory, or its name if it lies
    elsewhere.

    Other words stay as they are.

    >>> without_folders("net.json"), without_folders("random:8x3x32x32")
    ('net.json', 'random:8x3x32x32')
    >>> without_folders("/nowhere/here/net.py:small")
    'net.py:small'
    """
    if not os.path.isabs(word):
        return word
    path = Path(word)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def remember(
    opened: OpenedResults, mode: str, words: Sequence[str], place: Path | None = None
) -> dict[str, list[str]]:
    """Add a command to those that made some results, and write them into run.json with a
    checksum.

    Args:
        opened: the results.
        mode: the command's name there: "calib", "test" or "merge".
        words: the command.
        place: the folder to write to, if it is not that of the results.

    Returns:
        The commands of these results.

    Raises:
        ResultError: the folder cannot be written.
    """
    commands = {**opened.commands, mode: list(words)}
    folder = place or opened.folder
    write_json(folder / RUN_FILE, _facts(folder) | {COMMANDS: opened.sealed(commands)})
    return commands


def with_config(words: Sequence[str], name: str) -> list[str]:
    """Return a calibration's command with a config file of this name, unless it has one.

    >>> with_config(["quantizer", "--quant_mode", "calib", "--seed", "1"], "config.json")
    ['quantizer', '--quant_mode', 'calib', '--config_file', 'config.json', '--seed', '1']
    """
    if "--config_file" in words:
        return list(words)
    return [*words[:3], "--config_file", name, *words[3:]]


def remembered(folder: Path) -> dict[str, Any]:
    """Return the part of run.json that holds the commands, which may be empty."""
    facts = _facts(folder)
    return {COMMANDS: facts[COMMANDS]} if COMMANDS in facts else {}


def _facts(folder: Path) -> dict[str, Any]:
    """The content of run.json, empty where it is missing or damaged."""
    try:
        facts = read_json(folder / RUN_FILE)
    except ResultError:
        return {}
    return facts if isinstance(facts, dict) else {}
