"""Show progress as bars on a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from quantizer.calibration.events import Events, RunStage


def _progress(console: Console) -> Progress:
    """Return bars that disappear when they stop."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class Bars(Events):
    """Shows a bar for each stage of a run while it lasts."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bars: dict[int, tuple[Progress, TaskID]] = {}

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        bar = _progress(self._console)
        task = bar.add_task(stage.name, total=stage.total, completed=stage.done)
        self._bars[id(stage)] = (bar, task)
        bar.start()

    def advanced(self, stage: RunStage) -> None:
        """Update the bar."""
        bar, task = self._bars[id(stage)]
        bar.update(task, completed=stage.done, total=stage.total)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Remove the bar."""
        bar, _ = self._bars.pop(id(stage))
        bar.stop()


class StackedBars(Events):
    """Shows the bars of all stages below each other until the last step ends."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._progress = _progress(console)
        self._tasks: dict[int, TaskID] = {}

    def __enter__(self) -> "StackedBars":
        """Show the display."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the display."""
        self._progress.stop()

    def started(self, stage: RunStage) -> None:
        """Add a bar."""
        task = self._progress.add_task(stage.name, total=stage.total, completed=stage.done)
        self._tasks[id(stage)] = task

    def advanced(self, stage: RunStage) -> None:
        """Update the bar."""
        task = self._tasks[id(stage)]
        self._progress.update(task, completed=stage.done, total=stage.total)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Leave the bar as it is, complete if the stage has no known length."""
        task = self._tasks.pop(id(stage))
        if stage.total is None:
            self._progress.update(task, total=stage.done)
