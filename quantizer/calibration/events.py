"""What a run reports while it works: its stages, how far each is, what the user should know.
Shows nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from quantizer.config.diagnostics import Diagnostic
from quantizer.errors import WORKER_HELP, DataError, lost_worker

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What an interrupted stage needs to go on: tensors by name, and `state`, which JSON can
    hold.
    """

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


@dataclass
class Stage:
    """One part of a run: `with Stage(events, "calib", total=10) as stage: stage.advance()`.

    Args:
        events: who follows.
        name: for progress.
        total: how many units there are, if that is known.
        unit: what is counted.
        done: how many are done.
        saved_as: the name of the checkpoint that `snapshot` goes to.
        snapshot: makes one of what is found so far; None if there is nothing to go on from.
        needs_same_data: whether what was found is of no use with other data.
        at_boundary: whether this is a good moment to save, whatever the time.
    """

    events: Events
    name: str
    total: int | None = None
    unit: str = "batches"
    done: int = 0
    saved_as: str = ""
    snapshot: Callable[[], Snapshot] | None = None
    needs_same_data: bool = False
    at_boundary: bool = False

    def __enter__(self) -> Stage:
        self.events.started(self)
        return self

    def advance(self, done: int | None = None, *, at_boundary: bool = False) -> None:
        """One more unit is done, or `done` in all."""
        self.done, self.at_boundary = self.done + 1 if done is None else done, at_boundary
        self.events.advanced(self)

    def counted(self, units: Iterable[T]) -> Iterator[T]:
        """Hand on units, each of which is done when the next one is asked for."""
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
        """The end of a loader's process, with how far the stage was."""
        text = lost_worker(error)
        if text is None:
            return None
        return DataError(f"after {self.done} {self.unit}: {text}", help=WORKER_HELP)


class Events:
    """Whoever follows a run. Each method does nothing, for followers to override."""

    def started(self, stage: Stage) -> None:
        """A stage begins, with `stage.done` units done if it was resumed."""

    def advanced(self, stage: Stage) -> None:
        """A unit is done; `stage.snapshot` shows a consistent state now."""

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Something to log at a level of `logging`; `finding` is what it is about in the
        config.
        """

    def stopped(self, stage: Stage, error: BaseException | None) -> None:
        """A stage ends, complete or with an error."""


class Logged(Events):
    """Messages go to the package's logger, progress nowhere: for Python, where the application
    owns the terminal.
    """

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        logger.log(level, "%s", text)


class Forked(Events):
    """Several followers as one, in order; a stop goes to the last one first, as things are
    closed.
    """

    def __init__(self, *followers: Events) -> None:
        self._followers = followers

    def started(self, stage: Stage) -> None:
        for follower in self._followers:
            follower.started(stage)

    def advanced(self, stage: Stage) -> None:
        for follower in self._followers:
            follower.advanced(stage)

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        for follower in self._followers:
            follower.message(level, text, finding)

    def stopped(self, stage: Stage, error: BaseException | None) -> None:
        for follower in reversed(self._followers):
            follower.stopped(stage, error)


NOBODY = Events()
"""No follower."""
