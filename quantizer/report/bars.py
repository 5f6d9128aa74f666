"""Show progress as bars on a terminal."""

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


class Bars(Events):
    """Shows a bar for each stage of a run while it lasts."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bars: dict[int, tuple[Progress, TaskID]] = {}

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
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
