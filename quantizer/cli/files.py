"""Writes small text files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from quantizer.errors import UsageError


def write_text(path: str, text: str, *, encoding: str = "utf-8") -> None:
    """Write `text` to `path` by way of a temporary file beside it; newlines are written as they are.

    `UsageError` if the place cannot be written. The rights of a file that is replaced are kept.
    """
    target = Path(path).resolve()
    mode = target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask()
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with open(handle, "w", encoding=encoding, newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
