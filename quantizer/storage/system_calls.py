"""What files need of the system besides `open`: positions, pipes, the disk, and exchanges.

Knows nothing of whose files they are. All errors are OSErrors. Imports no torch.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

REPLACES_OPEN_FILES = hasattr(os, "pread")
"""Whether a file can be replaced while it is open. Windows cannot do this, and lacks
`os.pread`.
"""
PIPE_TIMEOUT_S = 10.0
"""Seconds to wait for the first bytes of a pipe, and again for the next ones."""
_BLOCK_BYTES = 1 << 20
"""The bytes that are read at once where not all are needed at the same time."""
_ALL_MAY_READ_AND_WRITE = 0o666
"""The permissions that programs ask for. The system removes those of the umask."""
_OWNER_MAY_READ_AND_WRITE = 0o600
_CURRENT_FOLDER = -100
"""AT_FDCWD of Linux: paths are relative to the current folder."""
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux."""
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EBUSY, errno.EXDEV)
"""The errors of a system or a file system that cannot exchange folders, and of a folder that is
the root of a file system.
"""
# Without `os.pread`, reading changes the position of the open file, which several threads share
_lock = threading.Lock()


def open_flags(*names: str) -> int:
    """Return flags for `os.open`, without those that the system lacks.

    On Windows, O_BINARY is added. Without it, reading and writing convert line ends.

    Args:
        names: of the flags, such as "O_RDONLY".
    """
    flags = getattr(os, "O_BINARY", 0)
    for name in names:
        flag = getattr(os, name, 0)
        flags |= flag
    return flags


def read_some(descriptor: int, buffer: memoryview, position: int) -> int:
    """Read from a position of a file into a buffer, and return the number of bytes. It may be
    less than the length of the buffer.

    Raises:
        OSError: the file ends there.
    """
    if hasattr(os, "preadv"):
        count = os.preadv(descriptor, [buffer], position)
    else:
        content = read_at(descriptor, len(buffer), position)
        count = len(content)
        buffer.cast("B")[:count] = content
    if not count:
        raise OSError(errno.EIO, "the file was cut off while it was read")
    return count


def read_at(descriptor: int, count: int, position: int) -> bytes:
    """Return at most `count` bytes from a position of a file, and none at its end."""
    if hasattr(os, "pread"):
        # Does not fill memory that a short file leaves unused
        return os.pread(descriptor, count, position)
    with _lock:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, count)


def write_at(descriptor: int, content: memoryview, position: int) -> int:
    """Write at a position of a file, and return the number of bytes that were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, content, position)
    with _lock:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, content)


class OpenDescriptor(Protocol):
    """A file that is open as long as this object exists."""

    descriptor: int


@dataclass(frozen=True)
class BytesInFile:
    """The place of bytes in an open file: the position of the first one, and their number."""

    file: OpenDescriptor
    start: int
    size: int

    def blocks(self) -> Iterator[memoryview]:
        """Yield the bytes in blocks, which share their memory.

        Raises:
            OSError: they cannot be read, or the file ends before they do.
        """
        block_size = min(_BLOCK_BYTES, self.size)
        block = memoryview(bytearray(block_size))
        position = self.start
        end = self.start + self.size
        while position < end:
            part = block[: end - position]
            count = read_some(self.file.descriptor, part, position)
            yield part[:count]
            position += count


def require_file_or_folder(path: str | os.PathLike[str]) -> None:
    """Check that a path is not a pipe, a socket or a device. Folders pass: opening one as a
    file is an error already.

    Raises:
        OSError: it is one of these, or does not exist.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


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


def write_synced(path: Path, parts: Iterable[bytes], old: Path | None = None) -> str:
    """Write a new file to the disk, and return its sha256. A file that cannot be completed is
    removed.

    Args:
        path: of the file, which does not exist.
        parts: its content.
        old: a file that it will replace, and whose permissions it gets. If there is none, it
            gets those that the system gives to new files.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    permissions: int | None = None
    creation_mode = _ALL_MAY_READ_AND_WRITE
    if old is not None and old.exists():
        permissions = stat.S_IMODE(old.stat().st_mode)
        # Nobody else may read the content before the file has the permissions of the old one
        creation_mode = _OWNER_MAY_READ_AND_WRITE
    digest = hashlib.sha256()
    flags = open_flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW")
    descriptor = os.open(path, flags, creation_mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if permissions is not None:
            os.chmod(path, permissions)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
    return digest.hexdigest()


def sync_file(path: Path) -> None:
    """Write to the disk what other programs have written to a file.

    Raises:
        OSError: it cannot be opened or written.
    """
    descriptor = os.open(path, open_flags("O_RDWR"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, so that a rename in it survives a power
    failure. Windows cannot open folders, and has no such call.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one call, so that both names are there at any moment.

    Returns:
        Whether the system can do this. If not, nothing is changed.

    Raises:
        OSError: it can, and failed.
    """
    rename = None
    if sys.platform.startswith("linux"):
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    text = ctypes.c_char_p
    rename.argtypes = (ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)
    paths = (os.fsencode(first), os.fsencode(second))
    if rename(_CURRENT_FOLDER, paths[0], _CURRENT_FOLDER, paths[1], _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))
