"""Files that are read whole: no pipe blocks a run for ever. Errors are OSErrors; imports no
torch.
"""

import errno
import os
import select
import stat
import time

from quantizer.storage.positioned_io import open_flags

PATIENCE = 10.0
"""Seconds that a pipe may take to give something, and again to give more."""


def require_plain(path: str | os.PathLike[str]) -> None:
    """Refuse pipes, sockets and devices; whether a folder is one is for who opens it.

    Raises:
        OSError: it is one of these, or nothing is there.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def read_start(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the first `most` bytes of a file, or of a pipe that a process writes to.

    Raises:
        OSError: it cannot be read, or nobody writes to the pipe.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        with open(path, "rb") as file:
            return file.read(most)
    # Opening a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, open_flags("O_RDONLY", "O_NONBLOCK"))
    try:
        return _from_pipe(descriptor, most)
    finally:
        os.close(descriptor)


def _from_pipe(descriptor: int, most: int) -> bytes:
    content = b""
    until = time.monotonic() + PATIENCE
    while len(content) < most:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise OSError(
                errno.ETIMEDOUT,
                f"it is a pipe without data for {PATIENCE:.0f} s",
            )
        part = os.read(descriptor, most - len(content))
        if not part:
            break
        content += part
        until = time.monotonic() + PATIENCE
    return content


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "something else")
