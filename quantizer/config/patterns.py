"""Match names of layers by globs and regular expressions of files, within a limit of time."""

import fnmatch
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quantizer.errors import QuantizerError

MATCHING_S = 2
"""The time limit for a regular expression."""


def glob_of_names(text: str) -> re.Pattern[str]:
    """Return the regular expression of a glob for layer names.

    Layer names have brackets, so a bracket is literal, and so is `[[]`, as shells write it.

    >>> bool(glob_of_names("*Linear[f?]*").fullmatch("Net::Net/Linear[fc]/linear"))
    True
    """
    literal = text.replace("[[]", "[").replace("[", "[[]")
    # It backtracks into no earlier star, so any number of stars is fast
    return re.compile(fnmatch.translate(literal))


@contextmanager
def matching_limit(text: str, error: type[QuantizerError]) -> Iterator[None]:
    """Stop a regular expression that backtracks for too long inside the `with` block.

    Python has no limit for that. A signal stops it, which only the main thread can receive, and
    which Windows lacks. Elsewhere the time is checked at the end.

    Args:
        text: the pattern.
        error: the class of errors to raise.

    Raises:
        error: it takes too long.
    """
    failure = error(
        f"the pattern {text!r:.200} takes more than {MATCHING_S} s to match names of layers",
        help="use no repetition inside another one, such as (a+)+",
    )
    start = time.monotonic()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "SIGALRM"):
        yield
        if time.monotonic() - start > MATCHING_S:
            raise failure
        return

    def stop(*_: object) -> None:
        raise failure

    handler = signal.signal(signal.SIGALRM, stop)
    # The user's code may have set a timer of its own
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, MATCHING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            remaining = max(remaining - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
