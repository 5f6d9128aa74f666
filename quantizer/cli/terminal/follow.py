"""Shows the progress of a run: bars on a terminal, otherwise a line every ten seconds."""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from quantizer.calibration.events import NO_FOLLOWER, Events, ForkedEvents, RunStage
from quantizer.cli.terminal import output
from quantizer.cli.terminal.screen import is_estimate, screen
from quantizer.config.diagnostics import Diagnostic

_logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0


_shared: ContextVar[Events | None] = ContextVar("shared display", default=None)
"""The display that all steps of `quantizer run` share."""


def progress(*, quiet: bool) -> Events:
    """Return the display of progress: bars on a terminal outside of CI, otherwise lines.

    With `--quiet` there is none, and with `--verbose` the end of each stage is logged, too.
    """
    if screen().verbose:
        return ForkedEvents(_display(quiet=quiet), Durations())
    return _display(quiet=quiet)


def _display(*, quiet: bool) -> Events:
    if quiet or screen().quiet:
        return NO_FOLLOWER
    shared = _shared.get()
    if shared is not None:
        return shared
    if _shows_bars():
        # Only terminals need it
        from quantizer.cli.terminal.bars import Bars

        return Bars(output.console(stderr=True))
    return Lines()


@contextmanager
def one_display() -> Iterator[None]:
    """Show the bars of all stages in one display, until the body ends."""
    if screen().quiet or not _shows_bars():
        yield
        return
    # Only terminals need it
    from quantizer.cli.terminal.bars import Bars

    bars = Bars(output.console(stderr=True), are_kept=True)
    token = _shared.set(bars)
    try:
        yield
    finally:
        _shared.reset(token)
        bars.stop()


def _shows_bars() -> bool:
    # A user's code may have replaced the stream
    is_terminal = getattr(sys.stderr, "isatty", bool)
    return is_terminal() and not os.environ.get("CI")


def run_display(sources: Mapping[str, str], *, quiet: bool) -> ForkedEvents:
    """Return the display of progress and messages; `sources` are the texts of config files."""
    return ForkedEvents(progress(quiet=quiet), Messages(sources))


class Messages(Events):
    """Prints findings with their lines of the config, and logs other messages."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Print or log a message."""
        if finding is None:
            _logger.log(level, "%s", text)
        else:
            # A run without findings does not need it
            from quantizer.cli.terminal.render import print_diagnostics

            print_diagnostics((finding,), self._sources)


class Durations(Events):
    """Logs how long each stage took."""

    def __init__(self) -> None:
        self._started: dict[int, float] = {}

    def started(self, stage: RunStage) -> None:
        """Start the clock of a stage."""
        self._started[id(stage)] = time.monotonic()

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Log the units of a stage and its time."""
        seconds = time.monotonic() - self._started.pop(id(stage))
        _logger.debug("%s: %d %s in %.2f s", stage.name, stage.done, stage.unit, seconds)


class Lines(Events):
    """Prints lines such as `calib 120/500 batches 24 % eta 63 s`, for one stage at a time."""

    def started(self, stage: RunStage) -> None:
        """Start the clock."""
        self._printed = time.monotonic()
        self._counted_from = stage.done
        self._first_ended: float | None = None

    def advanced(self, stage: RunStage) -> None:
        """Print a line if the last one is ten seconds old."""
        now = time.monotonic()
        if self._first_ended is None:
            self._first_ended = now
            # Neither units before this run count, nor its first one
            self._counted_from = stage.done
        if now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            print(self._line(stage, now - self._first_ended), file=sys.stderr, flush=True)

    def _line(self, stage: RunStage, elapsed: float) -> str:
        if not stage.total:
            doing = f": {stage.doing}" if stage.doing else ""
            return f"{stage.name} {stage.done} {stage.unit}{doing}"
        if stage.doing:
            return f"{stage.name} {stage.done}/{stage.total} {stage.unit}: {stage.doing}"
        done = stage.done - self._counted_from
        percent = 100 * stage.done // stage.total
        text = f"{stage.name} {stage.done}/{stage.total} {stage.unit} {percent} %"
        if is_estimate(done, elapsed):
            text += f" eta {elapsed / done * (stage.total - stage.done):.0f} s"
        return text
