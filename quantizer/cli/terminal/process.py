"""Handles Ctrl-C, SIGTERM and SIGHUP: raises an exception, or ends the process at once during
imports. Replaces standard output and error by streams whose failure does not end a run.

It imports little, because it runs first.
"""

import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from quantizer import plugins
from quantizer.storage import process_memory

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit code of each signal."""
if hasattr(signal, "SIGHUP"):
    _CODES[signal.SIGHUP] = 143
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that torchrun sets for each process."""
_ENCODING_ERRORS = "backslashreplace"
"""The encoding of a terminal may lack characters of layers or files."""


_CLEAR_LINE = "\r\x1b[K"
"""Moves the cursor of a terminal to the start of its line and clears the line."""
_SHOW_CURSOR = "\x1b[?25h"
"""Shows the cursor of a terminal, which a progress bar hides."""


class Terminated(KeyboardInterrupt):
    """Stands for SIGTERM or SIGHUP, as KeyboardInterrupt does for Ctrl-C."""


def is_rank() -> bool:
    """Return whether torchrun has started this process as one of several."""
    if not all(os.environ.get(name) for name in _RANK_VARIABLES):
        return False
    return int(os.environ["WORLD_SIZE"]) > 1


def handle_termination() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C from now on, unless they are ignored, as under
    nohup.
    """
    for number in _CODES:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminated)


def wait_briefly() -> None:
    """Let torch's threads wait for each other in a short loop, unless the user has chosen how.
    This comes before torch is imported.

    While other programs use the processors, a thread may have to wait for one that is not
    running. The loop of GNU OpenMP is so long by default that most of the time goes into it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


@contextmanager
def at_once() -> Iterator[None]:
    """End the process at once if a signal comes meanwhile. An import could swallow or change
    an exception.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _CODES}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)


def load(target: str) -> Any:
    """Import and return what a text such as "quantizer.cli.main:cli" names. Meanwhile a signal
    ends the process.
    """
    with at_once(), process_memory.importing(target.partition(":")[0]):
        return plugins.loaded(target)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    code = _CODES[signal.Signals(signum)]
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    with suppress(OSError):
        os.write(2, f"{cleared()}{word}\n".encode())
    os._exit(code)


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


class Outlet(io.FileIO):
    """A descriptor that stores its first error in `failure`, and then drops what is written."""

    failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Write or drop the content, and return its size."""
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
        """Return the failure, unless only the reader has ended, as `head` does."""
        if self.failure is None or self.failure.errno == errno.EPIPE:
            return None
        return self.failure


class _Text(io.TextIOWrapper):
    """A stream that the user's code cannot close."""

    def close(self) -> None:
        """Write the buffer."""
        self.flush()


def open_closed() -> None:
    """Open the null device for standard streams that are closed. Otherwise a file could get
    their number.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)


def install() -> Outlet:
    """Replace the standard streams, and return the new descriptor of standard output."""
    sys.stderr = _over(Outlet(2, "w", closefd=False), sys.stderr, "<stderr>", by_line=True)
    output = Outlet(1, "w", closefd=False)
    sys.stdout = _over(output, sys.stdout, "<stdout>", by_line=output.isatty())
    return output


def _over(outlet: Outlet, before: Any, name: str, *, by_line: bool) -> io.TextIOWrapper:
    """Return a stream with the encoding of `before`, which is None if it was closed."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    at_once = bool(getattr(before, "write_through", False))
    outlet.name = name
    # With `python -u` there is no buffer.
    buffer: Any = outlet if at_once else io.BufferedWriter(outlet)
    return _Text(
        buffer, encoding, _ENCODING_ERRORS, line_buffering=by_line, write_through=at_once
    )


def cleared() -> str:
    """Return what clears the line of a progress bar on standard error; "" elsewhere."""
    return _CLEAR_LINE + _SHOW_CURSOR if sys.stderr.isatty() else ""
