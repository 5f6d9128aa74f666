"""`plan` and its like take a trace from an earlier command: the same output, unless anything it
came from changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import DIGITS, ROOT

from quantizer.cli import trace_cache
from quantizer.cli.main import run_command
from quantizer.cli.trace_cache import folder, known_layers

pytestmark = pytest.mark.slow

FILE = """
import os
from pathlib import Path
import torch
from torch import nn
import parts

HERE = Path(__file__).parent
with open(HERE / "made.txt", "a") as file:
    file.write("x")

def model():
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Flatten(), parts.Head(WIDTH * 36))

def calibration_data():
    return [torch.load(HERE / "data.pt")] * len(list(HERE.glob("data*")))
"""
PARTS = """
import os
from torch import nn

class Head(nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, int(os.environ.get("NET_CLASSES", 4)))
"""


class Net:
    """A model of two files and its data; `made` counts how often it was imported."""

    def __init__(self, place: Path) -> None:
        import torch

        self.place = place
        self.write(8)
        (place / "parts.py").write_text(PARTS)
        torch.save(torch.ones(2, 3, 8, 8), place / "data.pt")

    def write(self, width: int) -> None:
        (self.place / "net.py").write_text(FILE.replace("WIDTH", str(width)))

    @property
    def made(self) -> int:
        return len((self.place / "made.txt").read_text())


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Net:
    monkeypatch.chdir(tmp_path)
    return Net(tmp_path)


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command and gives what it prints."""

    def run(*arguments: str) -> str:
        assert run_command([*arguments]) == 0
        return capfd.readouterr().out

    return run


def planned(text: str) -> dict[str, Any]:
    """A plan but for its peaks of memory, which are measured."""
    value: dict[str, Any] = json.loads(text)
    assert value.pop("peak_memory_bytes").keys() == {"calib", "test"}
    return value


CPU = str(ROOT / "configs" / "cpu_int8.json")
PLAN = ("plan", "--model", "net.py", "--config_file", CPU)
COMMANDS = (
    ("inspect", "--json"),
    ("inspect", "--algorithms"),
    ("inspect", "--target", "DPU"),
    ("inspect", "--config_file", CPU),
    ("explain", "0", "--config_file", CPU),
    ("diff", CPU, str(ROOT / "configs" / "gpu.json")),
)


def test_commands_say_the_same_without_making_the_model_again(
    net: Net, shown: Callable[..., str]
) -> None:
    first = planned(shown(*PLAN, "--json"))
    assert planned(shown(*PLAN, "--json")) == first
    for command in COMMANDS:
        assert shown(*command, "--model", "net.py")
        assert net.made == 1, command
    for number, command in enumerate(COMMANDS, 2):
        from_cache = shown(*command, "--model", "net.py")
        assert shown(*command, "--no-cache", "--model", "net.py") == from_cache
        assert net.made == number


@pytest.mark.parametrize(
    "preset", ["cpu_int8", "dpu", "example", "gptq_int4_group", "gpu", "weight_int8"]
)
def test_presets_plan_the_same_from_a_known_trace(
    preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = [
        "plan",
        "--model",
        DIGITS,
        "--config_file",
        str(ROOT / "configs" / f"{preset}.json"),
        "--json",
    ]
    found = []
    for more in ([], [], ["--no_cache"]):
        code = run_command([*plan, *more])
        out, err = capfd.readouterr()
        # Some are for other kinds of models
        found.append((code, planned(out) if code == 0 else err))
    assert found[0] == found[1] == found[2]


def test_passes_that_compute_with_weights_get_them(net: Net, shown: Callable[..., str]) -> None:
    config = json.loads(Path(CPU).read_text()) | {"include_cle": True}
    (net.place / "cle.json").write_text(json.dumps(config))
    shown(*PLAN)
    shown("plan", "--model", "net.py", "--config_file", "cle.json")
    assert net.made == 2


def change_code(net: Net) -> None:
    net.write(16)


def change_imported_code(net: Net) -> None:
    (net.place / "parts.py").write_text(PARTS.replace("4))", "5))"))


def change_data(net: Net) -> None:
    import torch

    torch.save(torch.ones(3, 3, 8, 8), net.place / "data.pt")


def change_folder(net: Net) -> None:
    (net.place / "data2.pt").write_bytes(b"")


def remove_nothing_but_the_trace(net: Net) -> None:
    for path in folder().glob("*.json"):
        path.unlink()


def damage_the_trace(net: Net) -> None:
    for path in folder().glob("*.json"):
        path.write_bytes(path.read_bytes()[:-100])


def fill_the_trace_with_other_things(net: Net) -> None:
    for path in folder().glob("*.json"):
        value = json.loads(path.read_bytes())
        value["graph"]["nodes"] = [{"name": {"torch": "load"}}]
        path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "change",
    [
        change_code,
        change_imported_code,
        change_data,
        change_folder,
        remove_nothing_but_the_trace,
        damage_the_trace,
        fill_the_trace_with_other_things,
    ],
)
def test_whatever_a_trace_came_from_makes_it_old(
    change: Callable[[Net], None],
    net: Net,
    shown: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown(*PLAN, "--json")
    change(net)
    monkeypatch.delitem(sys.modules, "parts")  # each command of a shell is a process of its own
    now = planned(shown(*PLAN, "--json"))
    assert net.made == 2
    monkeypatch.delitem(sys.modules, "parts")
    assert planned(shown(*PLAN, "--json", "--no_cache")) == now


def test_a_variable_makes_it_old(
    net: Net, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shown("inspect", "--model", "net.py")
    monkeypatch.setenv("NET_CLASSES", "7")
    assert shown("inspect", "--model", "net.py") != before
    assert net.made == 2


def test_notes_are_said_again(
    net: Net, shown: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    notes = []
    for _ in range(2):
        assert run_command(["inspect", "--model", "net.py"]) == 0
        notes.append(capfd.readouterr().err.splitlines())
    assert notes[0] == [line for line in notes[1] if "traced before" not in line]
    assert len(notes[1]) == len(notes[0]) + 1


def test_a_cache_that_cannot_be_written_changes_nothing(
    net: Net, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (net.place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(net.place / "file"))
    assert shown("inspect", "--model", "net.py") == shown("inspect", "--model", "net.py")
    assert net.made == 2


def test_old_traces_go(
    net: Net, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_cache, "KEPT", 2)
    for size in ("1", "2", "3"):
        shown("inspect", "--model", "net.py", "--batch_size", size)
    assert len([*folder().glob("*.json")]) == 2
    assert folder().stat().st_mode & 0o777 == 0o700


SHELLS = {
    "bash": """
eval "$(_QUANTIZER_COMPLETE=bash_source quantizer)"
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _quantizer_completion quantizer; }
shown() { printf '%s\n' "${COMPREPLY[@]}"; }
""",
    "zsh": """
compdef() { }
compadd() { found+=($completions) }
_describe() { found+=(${completions_with_descriptions%%:*}) }
eval "$(_QUANTIZER_COMPLETE=zsh_source quantizer)"
complete_words() { found=(); words=("$@"); CURRENT=$#; _quantizer_completion }
shown() { print -l -- $found }
""",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_codes_and_layers(
    shell: str, net: Net, shown: Callable[..., str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    shown(*PLAN)
    asked = (
        "quantizer pl",
        "quantizer plan --model net.py --filter ''",
        "quantizer explain QZ30",
    )
    script = SHELLS[shell] + "".join(
        f"complete_words {words}\nshown\necho --\n" for words in asked
    )
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, env=environment, check=True
    ).stdout
    commands, layers, codes = (part.split() for part in said.split("--\n")[:3])
    assert commands == ["plan"]
    assert layers == ["0", "1", "2", "3", "4", "input_0"]
    assert {"QZ301", "QZ302"} <= {*codes}
    assert all(code.startswith("QZ30") for code in codes)


def test_layers_are_known_for_the_model_that_was_traced(
    net: Net, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown("inspect", "--model", "net.py")
    assert known_layers("net.py") == known_layers(None) != []
    assert known_layers("other.py") == []
    monkeypatch.chdir(net.place.parent)
    assert known_layers(None) == []
