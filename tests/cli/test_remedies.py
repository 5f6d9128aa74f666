"""What is said to a user whose model, data or gate cannot give what is asked: what is wrong, where,
and what to do.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import ModelError

FILE = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 9))
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 9))


def images() -> Tensor:
    """Return images whose neighbours have similar values, as those of photos."""
    noise = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return noise.cumsum(-1).cumsum(-2) / 8


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float, tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = value  # type: ignore[index]
    with pytest.raises(ModelError, match=r"NaN or Inf: 1 of 108 values of 0\.weight") as error:
        quantizer.quantize(model, [images()], "w8", folder=tmp_path / "out")
    assert error.value.help == "load other weights: training diverged, or float16 overflowed"


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = network()
    with pytest.raises(ModelError, match=r"0\.weight has no values") as error:
        quantizer.quantize(model, [images()], "w8", folder=tmp_path / "out")
    assert "model.to_empty(device='cpu'), then load_state_dict()" in str(error.value.help)


def test_few_bits_for_a_network_that_no_engine_runs(tmp_path: Path) -> None:
    made = quantizer.quantize(network(), [images()], "w4", folder=tmp_path)
    assert made.verdict[1].startswith("Note: no engine runs weights of fewer than 8 bits")
    assert "the destination onnx makes a file with 8 bits" in made.verdict[1]


def test_a_gate_without_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FILE)
    assert run_command(["run", "net.py", "--gate", "accuracy"]) == 2
    shown = capsys.readouterr().err
    assert "--gate 'accuracy' is not a comparison" in shown
    assert "for example 'sqnr_db>=20' or 'top1_drop<=0.01'" in shown


def test_a_run_that_is_repeated_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FILE)
    save_file({"input": images()}, "my data.safetensors")
    run = ["run", "net.py", "--to", "pt2", "-o", "made"]
    assert run_command([*run, "--data", "my data.safetensors"]) == 0
    capsys.readouterr()
    assert run_command(run) == 2
    shown = capsys.readouterr().err
    assert "the run in made had --data 'my data.safetensors': give it again" in shown


def test_a_model_in_train_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = network().train()
    with caplog.at_level(logging.INFO, logger="quantizer"):
        quantizer.quantize(model, [images()], "w8", folder=tmp_path)
    assert "the model is in train mode; it runs in eval mode here" in caplog.text
    assert model.training


@pytest.mark.parametrize("function", ["randn", "rand"])
def test_data_that_are_random_numbers(function: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [getattr(torch, function)(12, 3, 8, 8, generator=generator)]
    made = quantizer.quantize(network(), data, "pt2", folder=tmp_path)
    note = f"Note: the data (args[0]) look like torch.{function}"
    assert any(line.startswith(note) for line in made.verdict)


def test_data_that_are_images_are_not_taken_for_random_numbers(tmp_path: Path) -> None:
    made = quantizer.quantize(network(), [images()], "pt2", folder=tmp_path)
    assert "look like" not in repr(made)
