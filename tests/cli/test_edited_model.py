"""A model that was edited after calibration is refused, wherever the edit is, even if the data do
not show it. One that was only moved or commented is tested as before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.runs import calibrate, check

from quantizer.cli.main import run_command
from quantizer.errors import ModelError
from quantizer.graph.tracing import trace as tracing

pytestmark = pytest.mark.usefixtures("traced_anew")
NET = """
import importlib
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import layers

HERE = Path(__file__).parent
SETTINGS = json.loads((HERE / "settings.json").read_text())
TEXT = {"F": F}
exec((HERE / "text.txt").read_text(), TEXT)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in "abcdef":
            self.add_module(name, nn.Linear(4, 4))
        self.second = importlib.import_module("late").second
        self.top = SETTINGS["top"]

    def forward(self, x):
        x = layers.first(self.a(x))
        x = self.second(self.b(x))
        x = F.hardtanh(self.c(x), 0, self.top)
        x = F.relu6(self.d(x)) if SETTINGS["cut"] else F.relu(self.d(x))
        x = TEXT["fifth"](self.e(x))
        x = F.relu(self.f(x)) if os.environ.get("OPEN") else F.relu6(self.f(x))
        return {"low": x * 0.5, "high": x * 2.0}


model = Net


def calibration_data():
    return list(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)).split(8))
"""
FILES = {
    "net.py": NET,
    "layers.py": "from torch.nn import functional as F\n\nfirst = F.relu6\n",
    "late.py": "from torch.nn import functional as F\n\nsecond = lambda x: F.relu6(x)\n",
    "text.txt": "fifth = lambda x: F.relu6(x)\n",
    "config.json": '{"global_quant_config": {"input_tensors": {"dtype": "int8"}}}',
    "settings.json": '{"top": 5.0, "cut": true}',
}


@dataclass(frozen=True)
class Project:
    """The folder of a model, and the results of its calibration."""

    folder: Path
    results: Path

    def copy(self, place: Path) -> Project:
        """Return a copy elsewhere."""
        shutil.copytree(self.folder, place / "moved")
        shutil.copytree(self.results, place / "results")
        return Project(place / "moved", place / "results")

    def edit(self, file: str, old: str, new: str) -> None:
        """Replace a text of a file, which is there once."""
        path = self.folder / file
        before = path.read_text()
        assert before.count(old) == 1
        path.write_text(before.replace(old, new))

    def tested(self) -> int:
        """The exit code of test mode."""
        return check(self.results, model=str(self.folder / "net.py"))


def untouched_export() -> Any:
    """The function that traces, without the memory that tests share."""
    return getattr(tracing._export, "export", tracing._export)


@pytest.fixture(scope="module")
def calibrated_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    place = tmp_path_factory.mktemp("project")
    folder = place / "net"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracing, "_export", untouched_export())
        given = {"model": str(folder / "net.py"), "config": str(folder / "config.json")}
        assert calibrate(place / "results", **given) == 0
    return Project(folder, place / "results")


@pytest.fixture
def project(calibrated_project: Project, tmp_path: Path) -> Project:
    return calibrated_project.copy(tmp_path)


def refuse(*_args: Any, **_options: Any) -> None:
    raise ModelError("the model was traced")


def test_a_model_that_was_moved_is_tested_without_a_trace(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_export", refuse)
    assert project.tested() == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "layer"),
    [
        ("net.py", "F.relu6(self.f(x))\n", "F.relu(self.f(x))\n", "relu"),
        ("net.py", "x * 2.0", "x * 2.5", "mul.1"),
        ("layers.py", "F.relu6", "F.relu", "relu"),
        ("late.py", "F.relu6", "F.relu", "relu"),
        ("text.txt", "F.relu6", "F.relu", "relu"),
        ("settings.json", "5.0", "4.5", "hardtanh"),
        ("settings.json", "true", "false", "relu"),
    ],
)
def test_an_edit_is_refused_with_the_layer(
    file: str,
    old: str,
    new: str,
    layer: str,
    project: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project.edit(file, old, new)
    assert project.tested() == 5
    assert f"layer Net::Net/{layer} differs" in capsys.readouterr().err


def test_another_environment_is_refused_with_the_layer(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPEN", "1")
    assert project.tested() == 5
    assert "layer Net::Net/relu differs" in capsys.readouterr().err


def test_outputs_in_another_order_are_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.edit("net.py", '"low": x * 0.5, "high": x * 2.0', '"high": x * 0.5, "low": x * 2.0')
    assert project.tested() == 0
    project.edit("net.py", '{"high": x * 0.5, "low": x * 2.0}', "[x * 0.5, x * 2.0][::-1]")
    assert project.tested() == 5
    assert "it returns Net::Net/mul.1 where it returned Net::Net/mul" in capsys.readouterr().err


def test_a_comment_is_traced_again_and_gives_the_same(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert project.tested() == 0
    before = (project.results / "report.json").read_bytes()
    project.edit("late.py", "second =", "# The second\nsecond =")
    assert project.tested() == 0
    assert (project.results / "report.json").read_bytes() == before
    monkeypatch.setattr(tracing, "_export", refuse)
    assert project.tested() == 3


def merged(project: Project) -> list[str]:
    """The arguments of `quantizer merge`."""
    results = str(project.results)
    return ["merge", results, results, "--output", str(project.folder / "merged")]


def analyzed(project: Project) -> list[str]:
    """The arguments of `quantizer analyze`."""
    config = str(project.folder / "config.json")
    return ["analyze", "--config_file", config, "--report", str(project.results)]


@pytest.mark.parametrize("command", [merged, analyzed])
def test_commands_that_read_the_graph_refuse_an_edit(
    command: Callable[[Project], list[str]],
    project: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project.edit("layers.py", "F.relu6", "F.relu")
    assert run_command([*command(project), "--model", str(project.folder / "net.py")]) == 5
    assert "layer Net::Net/relu differs" in capsys.readouterr().err
