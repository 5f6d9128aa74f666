"""Progress as bars on a terminal. Says nothing else."""

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
    """Follows a run with one bar for each stage, which vanishes at its end."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bars: dict[int, tuple[Progress, TaskID]] = {}

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=self._console, transient=True)
        self._bars[id(stage)] = (
            bar,
            bar.add_task(stage.name, total=stage.total, completed=stage.done),
        )
        bar.start()

    def advanced(self, stage: RunStage) -> None:
        """Move it."""
        bar, task = self._bars[id(stage)]
        bar.update(task, completed=stage.done)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Take it away."""
        self._bars.pop(id(stage))[0].stop()
