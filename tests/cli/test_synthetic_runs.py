"""`--data synthetic` on the command line and in Python: every report says that the data are
synthetic, and no metric of the task is measured on them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import llama, saved, tokens
from support.runs import ROOT

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import UsageError

CONFIG = ("--config_file", str(ROOT / "configs" / "cpu_int8.json"))
STAMP = "synthetic data, made from the model itself"
CALIBRATED = f"The network was calibrated on {STAMP}."
MEASURED = f"These figures are of {STAMP}."
NET = """import torch

def model():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3),
    )
    network[1].running_mean += 0.5
    return network

def example_input():
    return torch.zeros(1, 3, 4, 4)

def evaluate(model, data):
    batches = [(images, labels) for images, labels in data]
    return {"top1": sum(float((model(x).argmax(1) == y).sum()) for x, y in batches) / 8}
"""
LABELLED = """
def evaluation_data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, 4, 4, generator=generator), torch.arange(8) % 3)]
"""
NORMALIZER = """import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))

def example_input():
    return torch.zeros(1, 4)
"""


def run(mode: str, *options: str) -> int:
    """Run a mode on the model's file with few synthetic inputs."""
    words = ("--quant_mode", mode, "--model", "net.py", "-q", "--data", "synthetic")
    return run_command([*words, "--subset_len", "4", *options])


def content_of(name: str) -> Any:
    """Return the JSON of a result file."""
    return json.loads(Path("quantize_result", name).read_text())


def test_a_calibration_says_in_each_file_that_its_data_are_synthetic(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(NET + LABELLED)
    assert run("calib", *CONFIG) == 0
    assert f"note: calibrated on {STAMP}" in capsys.readouterr().out
    assert content_of("quant_info.json")["header"]["stamp"] == STAMP
    assert content_of("run.json")["stamp"] == STAMP
    assert content_of("report.json")["calibration_stamp"] == STAMP
    assert CALIBRATED in Path("quantize_result/report.html").read_text()
    first = Path("quantize_result/quant_info.json").read_bytes()
    assert run("calib", *CONFIG, "--output_dir", "again") == 0
    assert Path("again/quant_info.json").read_bytes() == first


def test_metrics_are_of_the_files_own_data(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(NET + LABELLED)
    assert run("calib", *CONFIG) == 0
    capsys.readouterr()
    assert run("test", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert "top1" in content["metrics"]
    assert content["calibration_stamp"] == STAMP
    assert "stamp" not in content
    page = Path("quantize_result/report.html").read_text()
    assert CALIBRATED in page
    assert MEASURED not in page


def test_without_other_data_figures_are_labelled_and_evaluate_is_not_called(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(NET)
    words = ["--to", "pt2", "--data", "synthetic", "--subset_len", "4"]
    assert run_command(["run", "net.py", *words, "--gate", "top1>=0"]) == 2
    assert "the data has no targets, and there is no evaluate()" in capsys.readouterr().err
    assert run_command(["run", "net.py", *words, "--evaluate", "net.py"]) == 2
    assert "metrics on synthetic data mean nothing" in capsys.readouterr().err
    assert not Path("quantize_result").exists()
    assert run_command(["run", "net.py", *words]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines.count(CALIBRATED) == lines.count(MEASURED) == 1
    assert "evaluate() is not called: the data are synthetic" in printed.err
    assert printed.err.count("making 4 inputs from the statistics of 1 batch norm") == 1
    report = content_of("report.json")
    assert report["stamp"] == report["calibration_stamp"] == STAMP
    assert not report["pairs"]


def test_plan_says_how_data_would_be_made_and_makes_none(
    write: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantizer.sources.synthetic.synthetic.match_batch_norms", None)
    words = [*CONFIG, "--data", "synthetic", "--model", write(NET)]
    assert run_command(["plan", *words]) == 0
    way = "32 inputs from the statistics of 1 batch norm, in 50 steps a batch"
    assert f"calibration first makes {way}" in capsys.readouterr().out
    assert run_command(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["synthetic_data"] == way
    write(NORMALIZER)
    assert run_command(["plan", *words]) == 4
    assert "it has no batch normalization with statistics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--seq_len", "8"), 2, "--seq_len is for texts, but the input of the model is float"),
        (("--preprocess", "{}"), 2, "--preprocess is for images, but the data is not images"),
        (("--stride", "8"), 2, "--stride is for texts, but the data is not text"),
        (("--data", "synthetic:8"), 2, "'synthetic:8' is not synthetic:NxCxHxW"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: tuple[str, ...],
    code: int,
    sentence: str,
    write: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(NET)
    assert run("calib", *CONFIG, *options) == code
    assert sentence in capsys.readouterr().err
    assert not Path("quantize_result").exists()


def test_a_folder_of_the_same_name_is_not_read_in_silence(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(write(NET)).with_name("synthetic").mkdir()
    words = ["--model", "net.py", "--data", "synthetic"]
    assert run_command(["plan", *CONFIG, *words]) == 0
    assert "./synthetic is the file or folder" in capsys.readouterr().err


def test_python_makes_and_labels_the_same_data(write: Callable[[str], str]) -> None:
    spec = importlib.util.spec_from_file_location("net", write(NET))
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    data = "synthetic:4x3x4x4"
    assert run("calib", *CONFIG) == 0
    result = quantizer.calibrate(net.model(), CONFIG[1], data, subset_len=4)
    result.save("python")
    for name in ("quant_info.json", "weights.safetensors"):
        shell = Path("quantize_result", name).read_bytes()
        assert Path("python", name).read_bytes() == shell
    compared = result.test()
    assert f"these figures are of {STAMP}" in repr(compared)
    assert f"calibrated on {STAMP}" in repr(compared)
    with pytest.raises(UsageError, match="needs real data"):
        result.test(evaluate=net.evaluate)
    with pytest.raises(UsageError, match="asks for data to calibrate with"):
        result.test("synthetic")
    with pytest.raises(UsageError, match="needs real data"):
        quantizer.quantize(net.model(), data, "pt2", evaluate=net.evaluate, folder="new")
    assert not Path("new").exists()
    tested = result.test([torch.ones(2, 3, 4, 4)])
    assert "these figures are of" not in repr(tested)
    assert tested.to_json()["calibration_stamp"] == STAMP


def test_a_language_model_is_calibrated_on_its_own_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "model", llama(hidden_size=128, intermediate_size=128))
    words = ["model", "--to", "w4", "--data", "synthetic", "--subset_len", "2"]
    assert run_command(["run", *words, "--seq_len", "12"]) == 0
    printed = capsys.readouterr()
    assert "making 2 sequences of 12 tokens sampled from the model" in printed.err
    lines = printed.out.splitlines()
    assert {CALIBRATED, MEASURED} <= set(lines)
    info = content_of("quant_info.json")
    assert info["header"]["data"]["inputs"] == {"kwargs['input_ids']": ["int64[12]"]}
    assert "perplexity" not in content_of("report.json")["metrics"]
    model = llama(hidden_size=128, intermediate_size=128)
    config = json.loads(Path("quantize_result/quantize_config.json").read_text())
    result = quantizer.calibrate(model, config, "synthetic", subset_len=1)
    assert result.test(tokens()).to_json()["calibration_stamp"] == STAMP
