"""`quantizer calib`, `test` and `float` run the modes of these names, and `--to` means one thing
in every command.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import ROOT

from quantizer.cli.main import run_command

NET = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def calibration_data():
    return [(torch.linspace(-1, 1, 16).view(2, 8), torch.zeros(2, dtype=torch.int64))]
"""
MODEL = ["--model", "net.py"]
DPU = str(ROOT / "configs" / "dpu.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def config_in(folder: Path) -> str:
    return (folder / "quantize_config.json").read_text("utf-8")


def test_without_a_config_calib_is_for_the_cpu_and_the_mode_for_the_dpu(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["calib", *MODEL, "-o", "cpu"]) == 0
    told = capsys.readouterr().err
    assert "wrote cpu/quantize_config.json from the preset cpu_int8" in told
    assert '"target_device": "CPU"' in config_in(folder / "cpu")
    assert run_command(["calib", *MODEL, "-o", "cpu"]) == 0
    assert "cpu/quantize_config.json is used" in capsys.readouterr().err
    assert run_command(["--quant_mode", "calib", *MODEL, "-o", "dpu"]) == 0
    assert "built-in default for the DPU" in capsys.readouterr().err
    assert not (folder / "dpu" / "quantize_config.json").exists()


def test_the_commands_write_what_the_modes_write(folder: Path) -> None:
    config = ["--config_file", DPU]
    assert run_command(["calib", *MODEL, *config, "-o", "first"]) == 0
    assert run_command(["test", *MODEL, "-o", "first"]) == 0
    assert run_command(["--quant_mode", "calib", *MODEL, *config, "-o", "second"]) == 0
    assert run_command(["--quant_mode", "test", *MODEL, "-o", "second"]) == 0
    for name in ("quant_info.json", "report.json", "Sequential.py"):
        assert (folder / "first" / name).read_bytes() == (folder / "second" / name).read_bytes()


def test_float_measures_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["float", *MODEL, "--json"]) == 0
    assert "top1" in json.loads(capsys.readouterr().out)["metrics"]


def test_a_destination_chooses_the_preset_and_is_checked_and_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="--to tensorrt needs it (extra: onnx)")
    assert run_command(["calib", *MODEL, "--to", "trt"]) == 0
    assert "from the preset tensorrt_int8" in capsys.readouterr().err
    assert run_command(["test", *MODEL, "--to", "trt", "-q", "--top", "1"]) == 0
    report = json.loads((folder / "quantize_result" / "report.json").read_text())
    assert [export["target"] for export in report["exports"]] == ["onnx"]
    words = "--to onnx --onnx_profile tensorrt"
    assert report["commands"][1] == f"quantizer --quant_mode test --model net.py {words}"


def test_a_config_that_cannot_be_used_stays_to_be_edited(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["calib", "--model", "absent.py"]) == 3
    assert not (folder / "quantize_result").exists()
    assert run_command(["calib", *MODEL, "--to", "q4_k_m"]) == 2
    assert "quantize_config.json:" in capsys.readouterr().err
    assert not (folder / "quantize_result" / "quant_info.json").exists()
    assert (folder / "quantize_result" / "quantize_config.json").exists()


def test_the_float_model_goes_nowhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--quant_mode", "float", *MODEL, "--to", "onnx"]) == 2
    assert "--to needs calib or test mode" in capsys.readouterr().err


def test_two_destinations_with_other_choices_are_two_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="--to tensorrt needs it (extra: onnx)")
    assert run_command(["calib", *MODEL, "-q"]) == 0
    assert run_command(["test", *MODEL, "-q", "--to", "trt", "--to", "npu"]) == 2
    assert "--to npu writes --onnx_profile npu" in capsys.readouterr().err


def test_other_commands_take_a_destination(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["init", "--to", "w8", "-o", "w8.json"]) == 0
    assert run_command(["init", "--preset", "weight_int8", "-o", "same.json"]) == 0
    assert (folder / "w8.json").read_bytes() == (folder / "same.json").read_bytes()
    config = ["--config_file", "w8.json"]
    assert run_command(["plan", *MODEL, *config, "--to", "w8"]) == 0
    assert "--to safetensors can express all tensors" in capsys.readouterr().out
    assert run_command(["doctor", *MODEL, *config, "--to", "safetensors"]) == 0
    assert "--to safetensors can hold the network" in capsys.readouterr().out
    assert run_command(["doctor", *MODEL, *config, "--to", "gguf"]) == 1
    assert "--to gguf" in capsys.readouterr().out
    assert run_command(["inspect", *MODEL, "--to", "dpu"]) == 0
    assert run_command(["init", "--to", "w8", "--preset", "dpu"]) == 2
