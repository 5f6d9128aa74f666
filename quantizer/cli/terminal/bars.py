"""Show progress as bars on a terminal."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from quantizer.calibration.events import Events, RunStage
from quantizer.cli.terminal.screen import is_estimate

_UNKNOWN = "-:--:--"


class _TimeLeft(TimeRemainingColumn):
    """The time that a stage still takes, once there is an estimate."""

    def render(self, task: Task) -> Text:
        """Return the time."""
        units = int(task.completed) - task.fields["counted_from"]
        if not task.finished and not is_estimate(units, task.elapsed or 0.0):
            return Text(_UNKNOWN, style="progress.remaining")
        return super().render(task)


class Bars(Events):
    """Shows a bar for each stage of a run while it lasts, or until `stop` if they are kept.

    Args:
        console: they are shown there.
        are_kept: whether the bars of ended stages stay, below each other.
    """

    def __init__(self, console: Console, *, are_kept: bool = False) -> None:
        super().__init__()
        self._are_kept = are_kept
        self._tasks: dict[int, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            # The usual color of a bar that grows looks like an error
            BarColumn(complete_style="cyan"),
            MofNCompleteColumn(),
            _TimeLeft(),
            console=console,
            transient=True,
        )

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        # A resumed stage has units that this run has spent no time on
        task = self._progress.add_task(
            stage.name, total=stage.total, completed=stage.done, counted_from=stage.done + 1
        )
        self._tasks[id(stage)] = task
        self._progress.start()

    def advanced(self, stage: RunStage) -> None:
        """Update the bar."""
        task = self._tasks[id(stage)]
        self._progress.update(task, completed=stage.done, total=stage.total)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Remove the bar. One that is kept is complete if the stage has no known length."""
        task = self._tasks.pop(id(stage))
        if self._are_kept:
            if stage.total is None:
                self._progress.update(task, total=stage.done)
            return
        if not self._tasks:
            self._progress.stop()
        self._progress.remove_task(task)

    def stop(self) -> None:
        """Remove all bars."""
        self._progress.stop()
