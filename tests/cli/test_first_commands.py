"""Mistakes on the command line of people who use it for the first time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.llamas import VOCABULARY

from quantizer.cli.main import run_command
from quantizer.export.destinations import DESTINATIONS

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))

def calibration_data():
    return [torch.ones(2, 4), torch.zeros(2, 4)]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command in a folder with a model; return the exit code."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    return lambda *words: run_command([*words])


@pytest.mark.parametrize(
    "words",
    [
        ("run", "net.py", "-o", ""),
        ("run", "", "--to", "w8"),
        ("--quant_mode", "calib", "--model", "net.py", "--config_file", ""),
        ("--quant_mode", "calib", "--model", "net.py", "--output_dir", ""),
    ],
)
def test_an_empty_path_is_refused_before_anything_is_written(
    words: tuple[str, ...], run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert "the path is empty; is a variable of the shell unset?" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["net.py"]


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_file_in_place_of_the_result_folder_is_refused(
    place: str, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").write_text("mine")
    assert run("run", "net.py", "--to", "w8", "-o", place) == 2
    error = capsys.readouterr().err
    assert f"error: cannot use {place}: taken is not a folder" in error
    assert run("--quant_mode", "calib", "--model", "net.py", "--output_dir", place) == 2
    assert "taken is not a folder" in capsys.readouterr().err
    assert Path("taken").read_text() == "mine"


def test_a_folder_that_is_not_there_is_named_by_diff(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", ".", "nowhere") == 2
    assert "there is no file or folder nowhere" in capsys.readouterr().err


def test_names_that_do_not_fit_are_refused_before_calibration(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    assert run("run", "net.py", "--to", "onnx", "--input_names", "a,b") == 2
    assert "--input_names has 2 names, and the model has 1 tensor" in capsys.readouterr().err
    assert not Path("quantize_result").exists()


def test_a_warning_of_each_pass_is_printed_once(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", "net.py", "--to", "w8", "--subset_len", "9") == 0
    assert capsys.readouterr().err.count("has 4 samples of the 9 asked for") == 1


def test_layers_that_checkpoints_cannot_hold_become_a_safetensors_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    assert DESTINATIONS["w4"].target_of(model) == "safetensors"
    assert "GPT2LMHeadModel has layers of the class Conv1D" in caplog.text


def test_the_end_of_a_file_is_no_interrupt(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """click takes any EOFError for Ctrl-D."""

    def damaged(*_: object, **__: object) -> None:
        raise EOFError("marshal data too short")

    monkeypatch.setattr("quantizer.cli.session.open_model", damaged)
    assert run("plan", "--model", "net.py") == 70
    assert "internal error: EOFError: marshal data too short" in capsys.readouterr().err
