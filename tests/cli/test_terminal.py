"""What a terminal shows: bars, Ctrl-C, and long lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import calibrate
from support.terminal import run_on_terminal, screen_of

from quantizer.cli.main import run_command

STOPPED = """
import os, signal, torch

def model():
    return torch.nn.Linear(1, 2)

class Batches:
    def __len__(self):
        return 4
    def __iter__(self):
        yield torch.ones(4, 1)
        yield torch.ones(4, 1)
        os.kill(os.getpid(), signal.SIGINT)
        yield torch.ones(4, 1)

def calibration_data():
    return Batches()
"""


def test_ctrl_c_prints_its_text_on_lines_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(STOPPED)
    code, lines = run_on_terminal(["--quant_mode", "calib", "--model", "net.py"], tmp_path)
    assert code == 130
    assert lines[-3:] == [
        "calib stopped after 2 batches; --resume continues from there",
        "interrupted",
        "",
    ]
    assert not [line for line in lines if "━" in line], "no bar is left"


def test_a_text_on_a_bar_is_seen() -> None:
    """The screen of these tests keeps what nothing has cleared."""
    assert screen_of("calib 3/20 interrupted\r\n") == ["calib 3/20 interrupted", ""]
    assert screen_of("calib 3/20\r\x1b[Kinterrupted\r\n") == ["interrupted", ""]


def test_lines_about_exports_break_between_words(
    toy: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = toy()
    folder = tmp_path / "out"
    assert calibrate(folder, model=model, config=None) == 0
    command = ["--quant_mode", "test", "--deploy", "safetensors", "--output_dir", str(folder)]
    capsys.readouterr()
    assert run_command([*command, "--model", model]) == 0
    piped = capsys.readouterr().out
    (line,) = [line for line in piped.splitlines() if line.startswith("deployed: ")]
    assert len(line) > 80
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_command([*command, "--model", model, "--color", "never"]) == 0
    shown = capsys.readouterr().out
    assert line.split() == shown[shown.index("deployed:") :].split()[: len(line.split())]
    for part in shown.splitlines():
        assert len(part) <= 80 or " " not in part.strip()
