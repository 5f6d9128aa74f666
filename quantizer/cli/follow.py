"""A run's events at the shell: bars on a terminal, a line every ten seconds elsewhere, messages
and findings.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping

from quantizer.calibration.events import NOBODY, Events, Forked, Stage
from quantizer.cli import session
from quantizer.cli.render import print_diagnostics
from quantizer.config.diagnostics import Diagnostic
from quantizer.report.bars import Bars

logger = logging.getLogger(__name__)

EVERY_S = 10.0


def progress(*, quiet: bool) -> Events:
    """Who shows how far a run is: a bar on a terminal, but never in CI, else lines; or
    nobody.
    """
    if quiet:
        return NOBODY
    return (
        Bars(session.console(stderr=True))
        if sys.stderr.isatty() and not os.environ.get("CI")
        else Lines()
    )


def followed(sources: Mapping[str, str], *, quiet: bool) -> Forked:
    """Progress and messages of a run; `sources` has the text of the config's files."""
    return Forked(progress(quiet=quiet), Messages(sources, quiet=quiet))


class Messages(Events):
    """Prints findings with the lines of the config that they are about; logs the rest, which
    prints it, too.
    """

    def __init__(self, sources: Mapping[str, str], *, quiet: bool) -> None:
        self._sources, self._quiet = sources, quiet

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Print or log it."""
        if finding is None:
            logger.log(level, "%s", text)
        elif not self._quiet:
            print_diagnostics((finding,), self._sources)


class Lines(Events):
    """Prints `calib 120/500 batches 24 % eta 63 s`, now and then."""

    def __init__(self) -> None:
        self._started = self._printed = time.monotonic()

    def started(self, stage: Stage) -> None:
        """Start the clock."""
        self._started = self._printed = time.monotonic()

    def advanced(self, stage: Stage) -> None:
        """Print a line, if the last one is long enough ago."""
        if time.monotonic() - self._printed >= EVERY_S:
            self._printed = time.monotonic()
            print(self._line(stage), file=sys.stderr, flush=True)

    def _line(self, stage: Stage) -> str:
        if not stage.total:
            return f"{stage.name} {stage.done} {stage.unit}"
        left = (
            (time.monotonic() - self._started) / max(stage.done, 1) * (stage.total - stage.done)
        )
        share = 100 * stage.done // stage.total
        return (
            f"{stage.name} {stage.done}/{stage.total} {stage.unit} {share} % eta {left:.0f} s"
        )
