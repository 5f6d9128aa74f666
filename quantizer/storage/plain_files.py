"""Refuse pipes and devices where a file is expected, and read from pipes with a time limit: a
run must not wait forever. All errors are OSErrors. Imports no torch.
"""

import errno
import os
import select
import stat
import time

from quantizer.storage.positioned_io import open_flags

PIPE_TIMEOUT_S = 10.0
"""Seconds to wait for the first bytes of a pipe, and again for the next ones."""


def require_file_or_folder(path: str | os.PathLike[str]) -> None:
    """Check that a path is not a pipe, a socket or a device. Folders pass: opening one as a
    file is an error already.

    Raises:
        OSError: it is one of these, or does not exist.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a file", str(path))


def read_start(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the first bytes of a file, or of a pipe that another process writes to.

    Args:
        path: the file or the pipe.
        most: the number of bytes to read. A shorter file is read completely.

    Raises:
        OSError: it cannot be read, or no process writes to the pipe.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        with open(path, "rb") as file:
            return file.read(most)
    # Without O_NONBLOCK, opening a pipe waits for a writer, without a time limit
    descriptor = os.open(path, open_flags("O_RDONLY", "O_NONBLOCK"))
    try:
        return _read_pipe(descriptor, most)
    finally:
        os.close(descriptor)


def _read_pipe(descriptor: int, most: int) -> bytes:
    """Return at most `most` bytes of a pipe.

    Raises:
        OSError: no bytes have come for `PIPE_TIMEOUT_S` seconds.
    """
    content = b""
    deadline = time.monotonic() + PIPE_TIMEOUT_S
    while len(content) < most:
        timeout = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([descriptor], [], [], timeout)
        if not ready:
            raise OSError(
                errno.ETIMEDOUT,
                f"it is a pipe to which no process has written for {PIPE_TIMEOUT_S:.0f} s",
            )
        part = os.read(descriptor, most - len(content))
        if not part:
            break
        content += part
        deadline = time.monotonic() + PIPE_TIMEOUT_S
    return content


def _kind(mode: int) -> str:
    """Return what a file of this mode is, as messages call it."""
    kinds = {
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "something else")
