"""What a run reports while it works: its stages, their progress, and messages to the user.

Followers show it; nothing is shown here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from quantizer.config.diagnostics import Diagnostic
from quantizer.distributed import Ranks
from quantizer.errors import WORKER_HELP, DataError, lost_worker

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What a stopped stage needs to resume.

    Args:
        tensors: by name.
        state: the rest, as JSON can hold it.
    """

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


@dataclass
class RunStage:
    """One part of a run: `with RunStage(events, "calib", total=10) as stage: stage.advance()`.

    Args:
        events: the follower.
        name: shown with the progress.
        total: how many units there are, if that is known.
        unit: what is counted.
        done: how many units are done.
        doing: the part of a long unit that is being done; empty if units are short.
        saved_as: the name of the checkpoint that `snapshot` is saved as.
        snapshot: returns a snapshot of the results so far; None if the stage has none.
        needs_same_data: whether the snapshot can only be used with the same data.
        at_boundary: whether to save now, even if the last save is recent.
    """

    events: Events
    name: str
    total: int | None = None
    unit: str = "batches"
    done: int = 0
    doing: str = ""
    saved_as: str = ""
    snapshot: Callable[[], Snapshot] | None = None
    needs_same_data: bool = False
    at_boundary: bool = False

    def __enter__(self) -> RunStage:
        self.events.started(self)
        return self

    def advance(self, done: int | None = None, *, at_boundary: bool = False) -> None:
        """Count one more unit as done, or set the count to `done`."""
        self.done = self.done + 1 if done is None else done
        self.at_boundary = at_boundary
        self.doing = ""
        self.events.advanced(self)

    def describe(self, doing: str) -> None:
        """Say which part of a long unit is being done."""
        self.doing = doing
        self.events.advanced(self)

    def counted(self, units: Iterable[_T]) -> Iterator[_T]:
        """Yield units, and count each as done when the next one is requested."""
        for unit in units:
            yield unit
            self.advance()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost = self._lost_worker(error)
        self.events.stopped(self, lost or error)
        if lost is not None:
            raise lost from error

    def _lost_worker(self, error: BaseException | None) -> DataError | None:
        """Return the error of a loader's process that ended, with the progress of the stage."""
        text = lost_worker(error)
        if text is None:
            return None
        return DataError(f"after {self.done} {self.unit}: {text}", help=WORKER_HELP)


class Events:
    """A follower of a run. Each method does nothing; subclasses override them."""

    def started(self, stage: RunStage) -> None:
        """Follow the start of a stage, which has `stage.done` units done if it is resumed."""

    def advanced(self, stage: RunStage) -> None:
        """Follow the progress of a stage; `stage.snapshot` is consistent now."""

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Log a message.

        Args:
            level: of `logging`.
            text: the message.
            finding: the finding on the config that it is about.
        """

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Follow the end of a stage, complete or with an error."""


class RankChecks(Events):
    """Checks after each unit of work whether another rank has stopped."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def advanced(self, stage: RunStage) -> None:
        """Raise an error if another rank has stopped."""
        self._ranks.check()


class LoggedEvents(Events):
    """Logs messages and ignores progress, as in Python the application owns the terminal."""

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        logger.log(level, "%s", text)


class ForkedEvents(Events):
    """Passes everything on to several followers in order, and the end of a stage in reverse."""

    def __init__(self, *followers: Events) -> None:
        self._followers = followers

    def started(self, stage: RunStage) -> None:
        for follower in self._followers:
            follower.started(stage)

    def advanced(self, stage: RunStage) -> None:
        for follower in self._followers:
            follower.advanced(stage)

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        for follower in self._followers:
            follower.message(level, text, finding)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        for follower in reversed(self._followers):
            follower.stopped(stage, error)


NO_FOLLOWER = Events()
"""No follower."""
