"""Progress: lines where there is no terminal, and bars. Both wait with an estimate."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from quantizer.calibration.events import RunStage
from quantizer.cli.terminal.bars import Bars
from quantizer.cli.terminal.follow import Lines


def set_times(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Let the clock of the lines show these times, one after another."""
    shown = iter(times)
    clock = SimpleNamespace(monotonic=lambda: next(shown))
    monkeypatch.setattr("quantizer.cli.terminal.follow.time", clock)


def test_an_estimate_waits_for_several_units_after_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch, 0.0, 60.0, 61.0, 62.0, 63.0, 70.0)
    with RunStage(Lines(), "calib", 10) as stage:
        for _ in range(5):
            stage.advance()
    # The first batch took a minute; the others take 2.5 s each
    lines = ["calib 1/10 batches 10 %", "calib 5/10 batches 50 % eta 12 s"]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_resumed_stage_is_estimated_from_the_units_of_this_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times(monkeypatch, 0.0, 1.0, 4.0, 7.0, 10.0)
    with RunStage(Lines(), "calib", 500, done=400) as stage:
        for _ in range(4):
            stage.advance()
    # 96 batches are left, and one takes 3 s
    assert capsys.readouterr().err == "calib 404/500 batches 80 % eta 288 s\n"


@pytest.mark.parametrize(
    ("units", "seconds", "is_shown"), [(2, 60, False), (8, 1, False), (8, 60, True)]
)
def test_bars_wait_with_an_estimate(units: int, seconds: float, is_shown: bool) -> None:
    console = Console(force_terminal=True, width=100, record=True)
    now = [0.0]
    bars = Bars(console)
    bars._progress.get_time = lambda: now[0]
    with RunStage(bars, "calib", 100) as stage:
        for _ in range(units):
            now[0] += seconds / units
            stage.advance()
        bars._progress.refresh()
        text = console.export_text()
    assert text.rstrip().endswith("-:--:--") is not is_shown, text
