"""Lines of progress, as they are printed where there is no terminal."""

from types import SimpleNamespace

import pytest

from quantizer.calibration.events import RunStage
from quantizer.cli.terminal.follow import Lines


def test_a_resumed_stage_is_estimated_from_the_units_of_this_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, 10.0, 10.0, 10.0))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("quantizer.cli.terminal.follow.time", clock)
    with RunStage(Lines(), "calib", 500, done=400) as stage:
        stage.advance()
    # 99 batches are left, and one took 10 s
    assert capsys.readouterr().err == "calib 401/500 batches 80 % eta 990 s\n"
