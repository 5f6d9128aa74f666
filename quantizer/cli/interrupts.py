"""Ctrl-C and its kin: an exception where there is something to put in order, and an end at once
where there is not.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143} | (
    {signal.SIGHUP: 143} if hasattr(signal, "SIGHUP") else {}
)
"""The exit code of each signal."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C wherever it strikes, the user's own code
    included.
    """


def handled() -> None:
    """From now on SIGTERM and SIGHUP are what Ctrl-C is, but for those that are ignored, as
    nohup has it.
    """
    for number in CODES:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminated)


@contextmanager
def at_once() -> Iterator[None]:
    """Meanwhile the process ends where it is: an import may swallow an exception, or make
    another error of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in CODES}
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
    code = CODES[signal.Signals(signum)]
    with suppress(OSError):
        os.write(2, b"terminated\n" if code == CODES[signal.SIGTERM] else b"interrupted\n")
    os._exit(code)


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
