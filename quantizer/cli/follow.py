"""A run's events at the shell: bars, messages, and findings with the lines of the config that they are about."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quantizer.cli import session
from quantizer.cli.progress import BatchProgress
from quantizer.cli.render import print_diagnostics
from quantizer.config.diagnostics import Diagnostic
from quantizer.engine.events import Stage

logger = logging.getLogger(__name__)


class Followed:
    """Follows one run; `sources` has the text of the config's files."""

    def __init__(self, sources: Mapping[str, str], *, quiet: bool) -> None:
        self._sources, self._quiet = sources, quiet
        self._progress: dict[int, BatchProgress] = {}

    def started(self, stage: Stage) -> None:
        """Open a bar."""
        bar = BatchProgress(stage.name, stage.total, bar=session.shows_bars(), quiet=self._quiet, unit=stage.unit)
        self._progress[id(stage)] = bar
        bar.__enter__()
        bar.advance(stage.done)

    def advanced(self, stage: Stage) -> None:
        """Move it."""
        self._progress[id(stage)].advance(stage.done)

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Print a finding with its excerpt; log anything else, which prints it and keeps it for run.log."""
        if finding is None:
            logger.log(level, "%s", text)
        elif not self._quiet:
            print_diagnostics((finding,), self._sources)

    def stopped(self, stage: Stage, error: BaseException | None) -> None:
        """Close the bar."""
        self._progress.pop(id(stage)).__exit__(None, None, None)
