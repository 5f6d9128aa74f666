"""Read and write at given positions of an open file, also on Windows, which lacks `os.pread`
and its like.
"""

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

REPLACES_OPEN_FILES = hasattr(os, "pread")
"""Whether a file can be replaced while it is open. Windows cannot do this, and lacks
`os.pread`.
"""
_BLOCK_BYTES = 1 << 20
"""The bytes that are read at once where not all are needed at the same time."""
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


def read_into(descriptor: int, buffer: memoryview, position: int) -> int:
    """Read from a position of a file into a buffer.

    Returns:
        The number of bytes read. It may be less than the length of the buffer, and is 0 at the
        end of the file.
    """
    if hasattr(os, "preadv"):
        buffers = [buffer]
        return os.preadv(descriptor, buffers, position)
    content = read_at(descriptor, len(buffer), position)
    buffer.cast("B")[: len(content)] = content
    return len(content)


def read_some(descriptor: int, buffer: memoryview, position: int) -> int:
    """Read as `read_into`, but raise an error at the end of the file.

    Raises:
        OSError: there is nothing to read.
    """
    count = read_into(descriptor, buffer, position)
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
