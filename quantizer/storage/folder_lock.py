"""Lock a folder against other writers. Readers need no lock."""

import contextlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.errors import ResultError

LOCK = "lock"
"""The name of the lock file in the work folder."""
_OWNER_BYTES = 100


@contextmanager
def folder_lock(folder: Path, work: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the `with` block. The system releases it even if the
    process is killed.

    Args:
        folder: what is locked, for messages.
        work: the subfolder with the lock file. It is made, and removed at the end if it is
            empty.

    Raises:
        OSError: the lock file cannot be created or opened.
        ResultError: another process holds the lock.
    """
    # Most commands lock nothing
    from filelock import FileLock, Timeout, UnixFileLock

    path = work / LOCK
    lock = FileLock(path, timeout=0)
    while not lock.is_locked:
        work.mkdir(exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:
            # A process that ends has removed the subfolder meanwhile
            continue
        except Timeout:
            raise ResultError(
                f"{folder} is in use by another run{_owner(path)}",
                help="wait for it or choose another <--output_dir>",
            ) from None
    # The other classes of filelock write to the lock file themselves, and remove it
    is_unix = isinstance(lock, UnixFileLock)
    try:
        if is_unix:
            _write_owner(path)
        yield
    finally:
        try:
            if is_unix:
                path.unlink(missing_ok=True)
        finally:
            lock.release()
        # Another process may have made a lock file in it meanwhile
        with contextlib.suppress(OSError):
            work.rmdir()


def _write_owner(path: Path) -> None:
    """Write into the lock file which process holds the lock, for messages. If the disk is full,
    the file stays empty: the lock needs no content.
    """
    owner = f"process {os.getpid()} on {platform.node()}"
    with contextlib.suppress(OSError):
        path.write_bytes(owner.encode()[:_OWNER_BYTES])


def _owner(path: Path) -> str:
    """Return ", process 123 on host" as the lock file says it, or "" if it says nothing."""
    content = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        content = file.read(_OWNER_BYTES)
    owner = content.decode(errors="replace")
    return f", {owner}" if owner.isprintable() and owner else ""
