"""Text files that a command writes where the user says."""

from __future__ import annotations

from pathlib import Path

from quantizer.atomic import replace_file
from quantizer.errors import UsageError


def write_text(path: str, text: str, *, encoding: str = "utf-8") -> None:
    """Write `text` to `path`, whole or not at all; newlines are written as they are.

    `UsageError` if the place cannot be written.
    """
    try:
        replace_file(Path(path), text.encode(encoding))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
