"""Keeps what a run writes where its user has said, also if the user's code changes the working
directory. Imports no torch.
"""

import glob
import os
from pathlib import Path

_start = Path.cwd()
_as_typed: dict[str, str] = {}
"""The relative paths of the command line, by the absolute ones."""


def enter_start_folder() -> None:
    """Note the working directory in which a command begins."""
    global _start
    _start = Path.cwd()
    _as_typed.clear()


def from_start(path: str) -> Path:
    """Return a path of the command line, absolute from where the command began."""
    place = Path(_start, path)
    if str(place) != path:
        _as_typed[str(place)] = os.path.normpath(path)
    return place


def unmoved(path: str | None) -> str | None:
    """Return an option that names an input. If the user's code has changed the working
    directory, paths are absolute. Words such as `random:8`, which name no file where the
    command began, stay as they are.
    """
    if path is None or Path.cwd() == _start:
        return path
    place = str(Path(_start, path))
    file, _, _ = place.rpartition(":")
    if glob.glob(place) or os.path.exists(file):
        return place
    return path


def as_typed(text: str) -> str:
    """Return a text for the user, with the paths of the command line as they were typed."""
    for place, typed in _as_typed.items():
        text = text.replace(place, typed)
    return text
