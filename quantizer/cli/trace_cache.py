"""Traces of earlier commands, in the user's cache folder: `plan` and its like need a model's
structure, no values.

A trace is taken from there while all that it came from is as it was: code, files, variables.
Files hold JSON alone.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantizer.sources.reads import are_unchanged
from quantizer.storage.atomic_write import replace_file

logger = logging.getLogger(__name__)

FORMAT = 2
KEPT = 64
"""So many traces are kept, the ones used last."""
PASSING = ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that shells change from command to command, and one that torch sets."""
Asked = tuple[object, ...]
"""What a trace was asked for, the model first."""


def folder() -> Path:
    """Where traces are: `quantizer` in `$XDG_CACHE_HOME`, by default in `~/.cache`.

    Raises:
        RuntimeError: nobody knows where the user's home is.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "quantizer"


def entry_of(asked: Asked) -> Path:
    """The file for this in this working directory.

    Raises:
        RuntimeError: there is no place for it.
    """
    return folder() / f"{_digest(os.getcwd(), asked[0])}-{_digest(*asked)}.json"


def stored(asked: Asked) -> dict[str, Any] | None:
    """What an earlier command kept for this, if it can be read and everything is as it was."""
    with contextlib.suppress(
        OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError
    ):
        place = entry_of(asked)
        entry: dict[str, Any] = json.loads(place.read_bytes())
        if (
            entry["format"] == FORMAT
            and entry["environment"] == environment()
            and are_unchanged(entry["reads"])
        ):
            os.utime(place)
            return entry
    return None


def keep(asked: Asked, entry: dict[str, Any]) -> None:
    """Keep what was found for this; a folder that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError, RuntimeError):
        place = entry_of(asked)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place, json.dumps({"format": FORMAT, **entry}).encode())
        for old in sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[
            :-KEPT
        ]:
            old.unlink()


def known_layers(model: str | None) -> list[str]:
    """The module paths of the layers in the latest trace of a model, or of any in this working
    directory.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        found = folder().glob(f"{_digest(os.getcwd(), model)}-*.json" if model else "*.json")
        for place in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            entry = json.loads(place.read_bytes())
            if entry["cwd"] == os.getcwd():
                return [str(name) for name in entry["layers"]]
    return []


def environment() -> str:
    """A digest of the Python that runs, of its folder and of the variables, but for those that
    shells change.
    """
    variables = {name: value for name, value in os.environ.items() if name not in PASSING}
    return _digest(sys.version, os.getcwd(), variables)


@contextmanager
def kept_notes() -> Iterator[list[tuple[int, str]]]:
    """What this package says meanwhile, as (level, text), to say it again when nothing is done
    anew.
    """
    notes: list[tuple[int, str]] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: notes.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    ours = logging.getLogger("quantizer")
    ours.addHandler(handler)
    try:
        yield notes
    finally:
        ours.removeHandler(handler)


def say_again(notes: list[list[Any]]) -> None:
    """Log what was said when the trace was made, and that it is not new."""
    logger.info(
        "the model was traced before, and nothing it came from has changed; --no_cache traces "
        "it anew"
    )
    for level, text in notes:
        logger.log(int(level), "%s", text)


def _digest(*words: object) -> str:
    return hashlib.blake2b(
        json.dumps(words, default=str, sort_keys=True).encode(errors="replace"), digest_size=10
    ).hexdigest()
