"""Read and write at positions of an open file, also where the system has no calls for that."""

import os
import threading

REPLACES_OPEN_FILES = hasattr(os, "pread")
"""Whether a file can be replaced while it is open. Windows has neither."""
# Without such calls, a position belongs to the file, which several threads read.
_lock = threading.Lock()


def open_flags(*names: str) -> int:
    """Return the flags of `os.open` with these names, without those that the system lacks.

    Windows has one more, without which it changes the ends of lines.
    """
    flags = getattr(os, "O_BINARY", 0)
    for name in names:
        flag = getattr(os, name, 0)
        flags |= flag
    return flags


def read_into(descriptor: int, buffer: memoryview, position: int) -> int:
    """Fill a buffer from a position on, and return the number of bytes: fewer if the system
    gives fewer, 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        buffers = [buffer]
        return os.preadv(descriptor, buffers, position)
    with _lock:
        os.lseek(descriptor, position, os.SEEK_SET)
        content = os.read(descriptor, len(buffer))
    length = len(content)
    buffer.cast("B")[:length] = content
    return length


def read_at(descriptor: int, count: int, position: int) -> bytes:
    """Return `count` bytes from a position on, or fewer, as `read_into` does."""
    content = bytearray(count)
    buffer = memoryview(content)
    length = read_into(descriptor, buffer, position)
    return bytes(buffer[:length])


def write_at(descriptor: int, content: memoryview, position: int) -> int:
    """Write at a position, and return the number of bytes that the system has taken."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, content, position)
    with _lock:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, content)
