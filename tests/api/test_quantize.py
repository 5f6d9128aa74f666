"""`quantizer.quantize` makes the same files as `quantizer run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import UsageError

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(2)]
"""
OF_ONE_RUN = ("run.json", "run.log", "report.html", "layers.csv", "report.json", "verify.json")
"""The shell alone writes logs and test results; pages name its commands."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(2)]


def test_the_shell_and_python_write_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    assert run_command(["run", "net.py", "-q", "--to", "pt2", "-o", "shell"]) == 0
    made = quantizer.quantize(network(), batches(), "pt2", folder="python")
    assert made.path == Path("python/export/Sequential.pt2")
    for path in sorted(Path("python").rglob("*")):
        if path.is_file() and path.name not in OF_ONE_RUN:
            assert path.read_bytes() == Path("shell", path.relative_to("python")).read_bytes()


def test_the_text_of_the_result_is_the_verdict(tmp_path: Path) -> None:
    made = quantizer.quantize(network(), batches(), "w8", folder=tmp_path)
    lines = repr(made).splitlines()
    assert lines == list(made.verdict)
    assert lines[0].startswith(
        f"Wrote {tmp_path}/export/Sequential.safetensors: int8 weights of"
    )
    assert lines[-1].startswith("Next: ")
    assert made.comparison.metrics["sqnr_db"] > 30
    assert made.verification.equal == 1.0


def test_a_destination_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no destination 'onx'") as error:
        quantizer.quantize(network(), batches(), "onx", folder=tmp_path)
    assert error.value.help == 'did you mean "onnx"?'


def test_missing_data_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with pytest.raises(UsageError, match="--to onnx needs calibration data"):
        quantizer.quantize(network(), to="onnx", folder=folder)
    assert not folder.exists()
