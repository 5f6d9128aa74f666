"""Holds the values of `-q`, `-v` and `--color` for one command, from any place in its line.
Prints versions and breaks lines.

It imports no torch.
"""

import logging
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import click

from quantizer import __version__
from quantizer.cli.arguments.places import as_typed
from quantizer.errors import LEFT_OUT, UsageError
from quantizer.printable import one_line

_logger = logging.getLogger(__name__)

COLORS = ("auto", "always", "never")
_FEWEST_UNITS = 3
_FEWEST_SECONDS = 2.0


@dataclass
class Screen:
    """How much one command prints, and whether in color.

    Attributes:
        quiet: print no progress and no notes.
        verbose: also print log records for debugging.
        color: one of `COLORS`.
        muted: print no notes and no warnings at the moment, except with `verbose`.
        left_out: a line for each analysis that failed, for run.log.
    """

    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    muted: bool = False
    left_out: list[str] = field(default_factory=list)

    @property
    def is_colored(self) -> bool | None:
        """Return whether output is colored; None if that depends on the stream."""
        if self.color != "auto":
            return self.color == "always"
        return False if os.environ.get("NO_COLOR") else None


_SCREEN: ContextVar[Screen | None] = ContextVar("_SCREEN", default=None)
"""The settings of the current command; None if no command runs."""


def screen() -> Screen:
    """Return the settings of the current command, or the default ones."""
    return _SCREEN.get() or Screen()


@contextmanager
def new_screen() -> Iterator[None]:
    """Start with the default settings, as each command does."""
    token = _SCREEN.set(Screen())
    try:
        yield
    finally:
        _SCREEN.reset(token)


def set_quiet(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Note `--quiet`, which a command and the group before it both take."""
    if value:
        screen().quiet = True
        _require_one()
    return value


def set_verbose(ctx: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Note `--verbose`, and print log records until the command ends."""
    if value and not screen().verbose and not ctx.resilient_parsing:
        screen().verbose = True
        _require_one()
        ctx.find_root().with_resource(_records_on_stderr(logging.DEBUG, logging.DEBUG))
        _logger.debug(
            "quantizer %s, %s, Python %s",
            __version__,
            torch_version(),
            platform.python_version(),
        )
    return value


def set_color(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Note `--color`, and apply it to what click prints."""
    if value is not None:
        screen().color = value
    ctx.color = screen().is_colored
    return value


def _require_one() -> None:
    """Raise `UsageError` if a command is to print both less and more."""
    if screen().quiet and screen().verbose:
        raise UsageError("--quiet and --verbose exclude each other", help="give one of them")


class _OneLine(logging.Formatter):
    """Formats a record as one line with escaped control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message. A detail begins with "debug:" and the part of the package."""
        text = one_line(record.getMessage())
        if record.levelno > logging.DEBUG:
            return text
        return f"debug: {record.name.removeprefix('quantizer.')}: {text}"


class _StderrHandler(logging.Handler):
    """Prints records on what is standard error at that moment.

    While a progress bar is shown, that is a stream that prints above the bar.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warnings: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record. A warning that was printed before is left out: each pass over the
        data gives it.
        """
        if record.name == LEFT_OUT:
            screen().left_out.append(record.getMessage())
        if screen().muted and not screen().verbose and record.levelno < logging.ERROR:
            return
        try:
            text = as_typed(self.format(record))
            is_repeated = record.levelno == logging.WARNING and text in self._warnings
            if is_repeated and not screen().verbose:
                return
            self._warnings.add(text)
            print(text, file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - as the handlers of logging do
            self.handleError(record)


@contextmanager
def notes_on_stderr(quiet: bool) -> Iterator[None]:
    """Print log records of the package on stderr, only warnings if `quiet`.

    With `--verbose` they are printed anyway.
    """
    if screen().verbose:
        yield
        return
    level = logging.WARNING if quiet or screen().quiet else logging.INFO
    with _records_on_stderr(logging.INFO, level):
        yield


@contextmanager
def _records_on_stderr(logged: int, shown: int) -> Iterator[None]:
    """Log records of the level `logged` and above, and print those of `shown` and above."""
    logger = logging.getLogger("quantizer")
    handler = _StderrHandler()
    handler.setFormatter(_OneLine())
    handler.setLevel(shown)
    level = logger.level
    propagate = logger.propagate
    logger.setLevel(logged)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@contextmanager
def without_notes() -> Iterator[None]:
    """Print no notes and no warnings meanwhile: they would be about trials, not the result."""
    before = screen().muted
    screen().muted = True
    try:
        yield
    finally:
        screen().muted = before


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Log how long a step took, for `--verbose`."""
    started = time.monotonic()
    yield
    _logger.debug("%s: %.2f s", step, time.monotonic() - started)


def print_versions(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the versions for `--version`, and end the command."""
    if not value or ctx.resilient_parsing:
        return
    click.echo(f"quantizer, version {__version__}")
    click.echo(torch_version())
    ctx.exit()


def torch_version() -> str:
    """Return the installed version of torch in words."""
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "torch not installed"


def is_estimate(units: int, seconds: float) -> bool:
    """Return whether so many units in so much time, after the first, show how long others take.

    The first unit often takes longer: files are opened, and kernels are chosen.
    """
    return units >= _FEWEST_UNITS and seconds >= _FEWEST_SECONDS


def starts_of_lines(text: str, width: int) -> list[int]:
    """Return the positions of words that begin another line, where lines have this width."""
    starts = []
    line_start = 0
    for word in re.finditer(r"\S+", text):
        if word.end() - line_start > width and word.start() > line_start:
            line_start = word.start()
            starts.append(line_start)
    return starts
