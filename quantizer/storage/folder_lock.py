"""The lock that a writer of a folder holds against other writers. Readers need none."""

import contextlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, UnixFileLock

from quantizer.errors import ResultError

_LOCK = ".lock"
_OWNER_BYTES = 100


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. The system releases it when the process ends, however it ends.

    Raises:
        OSError: the lock file cannot be created or opened.
        ResultError: another process holds the lock, or the lock file is not a file.
    """
    path = folder / _LOCK
    if path.exists() and not path.is_file():
        raise ResultError(f"{path} is not a file, so it cannot be locked", help="remove it")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ResultError(
            f"{folder} is in use by another run{_owner(path)}",
            help="wait for it or choose another --output_dir",
        ) from None
    # Other kinds of locks write the file themselves, and remove it when they are released.
    is_unix = isinstance(lock, UnixFileLock)
    try:
        if is_unix:
            _write_owner(path)
        yield
    finally:
        if is_unix:
            path.unlink(missing_ok=True)
        lock.release()


def _write_owner(path: Path) -> None:
    """Write who holds the lock, for people to read. A full disk has no room for it, but the
    lock holds without it.
    """
    owner = f"process {os.getpid()} on {platform.node()}"
    with contextlib.suppress(OSError):
        path.write_bytes(owner.encode()[:_OWNER_BYTES])


def _owner(path: Path) -> str:
    """Return a comma and who holds the lock, or "" if the file does not say that."""
    content = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        content = file.read(_OWNER_BYTES)
    owner = content.decode(errors="replace")
    return f", {owner}" if owner.isprintable() and owner else ""
