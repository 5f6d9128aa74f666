"""A file of the user's runs once for each command, whatever options name it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import calibrate, check

from quantizer.cli.main import run_command

FILE = """
import torch
from pathlib import Path

kept = []
with (Path(__file__).parent / "runs").open("a") as log:
    log.write("run ")

def model():
    torch.manual_seed(0)
    kept.append(True)
    return torch.nn.Linear(3, 2)

def data():
    assert kept, "this is not the module whose model() was called"
    return [torch.ones(4, 3)] * 2

def evaluate(model, batches):
    return {"kept": float(len(kept))}
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path / "net.py"


def test_model_data_and_evaluation_share_what_the_file_keeps(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(net.parent)
    out, runs = net.parent / "out", net.parent / "runs"
    assert calibrate(out, "--data", "net.py:data", model=str(net), config=None) == 0
    assert runs.read_text() == "run "
    more = ["--data", f"{net}:data", "--evaluate", f"{net}:evaluate", "--gate", "kept>=1"]
    assert check(out, *more, model=str(net)) == 0
    assert runs.read_text() == "run run ", "the next command runs it again"


def test_a_file_that_was_mended_is_read_again(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net.write_text("raise ValueError('not yet')")
    assert run_command(["inspect", "--model", str(net), "--data", f"{net}:data"]) == 3
    assert "not yet" in capsys.readouterr().err
    net.write_text(FILE)
    assert run_command(["inspect", "--model", str(net), "--data", f"{net}:data"]) == 0
