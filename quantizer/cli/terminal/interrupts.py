"""Handles Ctrl-C, SIGTERM and SIGHUP: raises an exception, or ends the process at once during
imports.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from quantizer.cli.terminal.streams import cleared

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit code of each signal."""
if hasattr(signal, "SIGHUP"):
    _CODES[signal.SIGHUP] = 143


class Terminated(KeyboardInterrupt):
    """Stands for SIGTERM or SIGHUP, as KeyboardInterrupt does for Ctrl-C."""


def handle_termination() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C from now on, unless they are ignored, as under
    nohup.
    """
    for number in _CODES:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminated)


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


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    code = _CODES[signal.Signals(signum)]
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    with suppress(OSError):
        os.write(2, f"{cleared()}{word}\n".encode())
    os._exit(code)


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
