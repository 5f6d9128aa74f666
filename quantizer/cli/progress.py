"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_S = 10.0


class BatchProgress:
    """Counts batches or layers: `with BatchProgress("calib", total=10) as progress: progress.advance()`."""

    def __init__(self, label: str, total: int | None, *, bar: bool, quiet: bool, unit: str = "batches") -> None:
        self._label, self._total, self._quiet, self._unit = label, total, quiet, unit
        self._started = self._reported = time.monotonic()
        self._done = 0
        self._bar = _bar() if bar and not quiet else None
        self._task = self._bar.add_task(label, total=total) if self._bar else None

    def __enter__(self) -> BatchProgress:
        if self._bar:
            self._bar.start()
        return self

    def advance(self, done: int | None = None) -> None:
        """One more, or `done` in all."""
        self._done = self._done + 1 if done is None else done
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif not self._quiet and time.monotonic() - self._reported >= EVERY_S:
            self._reported = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def _line(self) -> str:
        """`calib 120/500 batches 24 % eta 63 s`."""
        if not self._total:
            return f"{self._label} {self._done} {self._unit}"
        left = (time.monotonic() - self._started) / max(self._done, 1) * (self._total - self._done)
        share = 100 * self._done // self._total
        return f"{self._label} {self._done}/{self._total} {self._unit} {share} % eta {left:.0f} s"


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
