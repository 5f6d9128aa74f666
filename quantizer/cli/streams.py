"""Standard output and error that never end a run: closed ones lead nowhere, and what cannot be
written is noted.

Imports little, as it is the first thing that runs.
"""

import errno
import io
import os
import select
import sys
from typing import Any

ERRORS = "backslashreplace"
"""A layer's or a file's name may hold what the terminal's encoding lacks."""


class Outlet(io.FileIO):
    """A descriptor of which the first failure is noted in `failure`; what comes after it is
    dropped.
    """

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Return the size of the content, which is written or dropped."""
        left = memoryview(content).cast("B")
        size = left.nbytes
        while left and self.failure is None:
            try:
                count = super().write(left)
            except OSError as error:
                self.failure = error
                break
            if count is None:
                # The descriptor does not block, and its reader is slow.
                select.select([], [self.fileno()], [])
            else:
                left = left[count:]
        return size

    @property
    def lost(self) -> OSError | None:
        """The failure, unless it is that the reader has gone, as `head` does when it has seen
        enough.
        """
        if self.failure is None or self.failure.errno == errno.EPIPE:
            return None
        return self.failure


class _Text(io.TextIOWrapper):
    """A stream that code of the user's cannot close."""

    def close(self) -> None:
        """Write what is buffered."""
        self.flush()


def open_closed() -> None:
    """Open the null device in place of standard streams that are closed: files would get their
    numbers.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


def install() -> Outlet:
    """Put streams of this module in place of Python's; return what standard output writes
    to.
    """
    sys.stderr = _over(Outlet(2, "w", closefd=False), sys.stderr, "<stderr>", by_line=True)
    output = Outlet(1, "w", closefd=False)
    sys.stdout = _over(output, sys.stdout, "<stdout>", by_line=output.isatty())
    return output


def _over(outlet: Outlet, before: Any, name: str, *, by_line: bool) -> io.TextIOWrapper:
    """Return a stream with the encoding of the one before it, which is None if it was
    closed.
    """
    encoding = getattr(before, "encoding", None) or "utf-8"
    at_once = bool(getattr(before, "write_through", False))
    outlet.name = name
    # Python's own streams have no buffer where `-u` asks for none.
    buffer: Any = outlet if at_once else io.BufferedWriter(outlet)
    return _Text(buffer, encoding, ERRORS, line_buffering=by_line, write_through=at_once)
