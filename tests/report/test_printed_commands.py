"""What `Next:` and report.html print runs as it stands, in the folder where the run began."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.configs import document

from quantizer.cli.main import run_command

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )

def small():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, 4, 4, generator=generator) for _ in range(4)]
"""
EVALUATE = """
def evaluate(model, data):
    return {"share": float(sum((model(x) > 0).float().mean() for x in data))}
"""
W8 = ["--to", "w8"]
RUNS = {
    "default": ["net.py", *W8],
    "another folder": ["net.py", *W8, "-o", "other folder"],
    "a factory": ["net.py:small", *W8, "-o", "out"],
    "weights": ["net.py", *W8, "--weights", "other.safetensors", "-o", "out"],
    "data": ["net.py", *W8, "--data", "some data.npy", "--subset_len", "20", "-o", "out"],
    "other data to judge": ["net.py", *W8, "--eval_data", "some data.npy", "-o", "out"],
    "evaluate": ["net.py", *W8, "--evaluate", "judge.py", "-o", "out"],
    "trust": ["net.pt2", *W8, "--trust", "--data", "some data.npy", "-o", "out"],
    "a config": ["net.py", "--to", "pt2", "--config_file", "mine.json", "-o", "out"],
    "far paths": ["{far}/far.py", *W8, "-o", "{far}/out"],
    "a layer in float": ["net.py", *W8, "--keep_float", "3", "-o", "out"],
    "a gate that fails": [
        "net.py",
        *W8,
        "--gate",
        "sqnr_db>=52",
        "--minutes",
        "0",
        "-o",
        "out",
    ],
    "an option of the target": ["net.py", "--to", "trt", "-o", "out"],
    "a limit of the size": ["net.py", "--to", "pt2", "--max_mb", "2", "-o", "out"],
    "far from float": ["net.py", "--to", "w4", "--config_file", "narrow.json", "-o", "out"],
}
"""The arguments of `quantizer run`."""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the current one, which has what the runs read."""
    here = tmp_path / "here"
    elsewhere = tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    (here / "net.py").write_text(MODEL)
    (here / "judge.py").write_text(EVALUATE)
    (elsewhere / "far.py").write_text(MODEL)
    names: dict[str, object] = {}
    exec(MODEL, names)
    network = names["model"]()  # type: ignore[operator]
    save_file(network.state_dict(), here / "other.safetensors")
    batch = torch.randn(8, 3, 4, 4)
    shapes = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    torch.export.save(
        torch.export.export(network.eval(), (batch,), dynamic_shapes=shapes), here / "net.pt2"
    )
    data = np.random.default_rng(3).standard_normal((24, 3, 4, 4))
    np.save(here / "some data.npy", data.astype("float32"))
    config = json.dumps(document())
    (here / "mine.json").write_text(config)
    (here / "narrow.json").write_text(config.replace('"bit_width": 8', '"bit_width": 2'))
    return elsewhere


def copied(page: Path) -> list[str]:
    """The commands of a page that have a button."""
    return [
        html.unescape(text)
        for text in re.findall(r"<pre>(quantizer .*?)</pre>", page.read_text())
    ]


def pasted(commands: list[str], files: set[Path]) -> None:
    """Run commands, which may write only into the folders that are there."""
    assert commands
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "quantizer"
        assert run_command([*words, "-q"]) == 0, command
    assert set(Path().iterdir()) == files


@pytest.mark.parametrize("case", RUNS)
def test_the_commands_of_a_run_are_pasted(
    case: str, far: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "an option of the target":
        pytest.importorskip("onnxruntime", reason="--to tensorrt needs it (extra: onnx)")
    arguments = [word.format(far=far) for word in RUNS[case]]
    code = run_command(["run", *arguments, "-q"])
    assert code == int(case == "a gate that fails")
    files = set(Path().iterdir())
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("Next: ")
    printed = re.findall("`(.*?)`", told)
    pasted(printed, files)
    folder = far / "out"
    if case == "default":
        folder = Path("quantize_result")
    elif case != "far paths":
        folder = Path(arguments[-1])
    assert set(printed) <= {*copied(folder / "report.html")}


def test_the_commands_of_the_modes_are_pasted(far: Path) -> None:
    given = ["--model", "net.py", "--data", "some data.npy", "-q"]
    calib = ["--quant_mode", "calib", "--config_file", "mine.json", "--output_dir", "one"]
    assert run_command([*calib, *given]) == 0
    assert run_command(["retune", "one", "--statistic", "mean", "--output_dir", "two"]) == 0
    assert run_command(["merge", "one", "one", "--model", "net.py", "-o", "both"]) == 0
    files = set(Path().iterdir())
    for folder in ("one", "two", "both"):
        page = Path(folder, "report.html")
        next_step, *others = copied(page)
        pasted([next_step], files)
        assert "test mode measures" not in page.read_text()
        pasted(others, files)
