"""Measures how long the threads of a process wait for a processor that others use.

A file that runs while other programs take the processors has a wrong speed, and its rounds may
agree on it. Linux counts these waits for each thread.
"""

from __future__ import annotations

import os
from pathlib import Path

_NANOSECONDS = 1e9


def waited_seconds(process: int | None = None) -> float:
    """Return for how many seconds the threads of a process were ready and did not run.

    The waits of all threads since their start are added up. Source: Linux,
    Documentation/scheduler/sched-stats.rst. Other systems do not count them: there it is 0.

    Args:
        process: its number; None for this one.
    """
    number = os.getpid() if process is None else process
    nanoseconds = 0
    for path in Path(f"/proc/{number}/task").glob("*/schedstat"):
        try:
            _, waited, _ = path.read_text("ascii").split()
        except (OSError, ValueError):
            # A thread has ended, or the kernel does not count
            continue
        nanoseconds += int(waited)
    return nanoseconds / _NANOSECONDS
