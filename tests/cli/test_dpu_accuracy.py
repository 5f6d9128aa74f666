"""`--dpu_accuracy high` at the shell and in Python: what it gains, what it stands for, and
where it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.runs import ROOT, calibrate, check

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import UsageError
from quantizer.sources.models import load_model

SKEWED = str(ROOT / "examples" / "digits_mobile.py:skewed")
DPU, CPU = (str(ROOT / "configs" / f"{name}.json") for name in ("dpu", "cpu_int8"))
FILES = ("weights.safetensors", "bias_corr.safetensors", "quant_info.json")
Capture = pytest.CaptureFixture[str]


def sqnr(folder: Path, capsys: Capture, *more: str) -> float:
    capsys.readouterr()
    assert check(folder, *more, "--json", model=SKEWED) == 0
    found: float = json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"]
    return found


@pytest.fixture(scope="module")
def high(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("high")
    assert calibrate(folder, "--dpu_accuracy", "high", model=SKEWED, config=DPU) == 0
    return folder


@pytest.mark.slow
def test_a_network_that_the_dpus_scales_destroy_is_saved(
    high: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert calibrate(tmp_path / "plain", model=SKEWED, config=DPU) == 0
    assert sqnr(tmp_path / "plain", capsys) < 1
    assert sqnr(high, capsys, "--config_file", DPU, "--dpu_accuracy", "high") > 24


@pytest.mark.slow
def test_it_is_equalization_bias_correction_and_finetuning(high: Path, tmp_path: Path) -> None:
    config = json.loads(Path(DPU).read_text()) | {
        "include_cle": True,
        "include_bias_corr": True,
    }
    (tmp_path / "all.json").write_text(json.dumps(config))
    assert (
        calibrate(
            tmp_path / "three",
            "--fast_finetune",
            model=SKEWED,
            config=str(tmp_path / "all.json"),
        )
        == 0
    )
    for name in FILES[:2]:
        assert (high / name).read_bytes() == (tmp_path / "three" / name).read_bytes()
    loaded = load_model(SKEWED)
    assert loaded.calibration_data
    result = quantizer.calibrate(
        loaded.module, DPU, loaded.calibration_data, subset_len=64, dpu_accuracy="high"
    )
    result.save(tmp_path / "python")
    for name in FILES:
        assert (high / name).read_bytes() == (tmp_path / "python" / name).read_bytes()
    x = loaded.calibration_data().__iter__().__next__()[0]
    opened = quantizer.load(high, loaded.module, loaded.calibration_data)
    assert torch.equal(opened.network(x), result.network(x))


@pytest.mark.slow
def test_the_built_in_default_is_raised_and_read_again(tmp_path: Path) -> None:
    more = ("--dpu_accuracy", "high")
    assert calibrate(tmp_path / "out", *more, model=SKEWED, config=None) == 0
    loaded = load_model(SKEWED)
    assert loaded.calibration_data
    assert (
        quantizer.load(tmp_path / "out", loaded.module, loaded.calibration_data)
        .test()
        .metrics["sqnr_db"]
        > 24
    )


def test_it_is_refused_elsewhere(tmp_path: Path, capsys: Capture) -> None:
    assert calibrate(tmp_path / "out", "--dpu_accuracy", "high", model=SKEWED, config=CPU) == 2
    assert (
        "--dpu_accuracy high is for the DPU, and this config is for CPU"
        in capsys.readouterr().err
    )
    words = ["--dpu_accuracy", "high", "--model", SKEWED]
    assert run_command(["--quant_mode", "float", *words]) == 2
    assert "--dpu_accuracy needs calib mode" in capsys.readouterr().err
    assert run_command(["plan", "--config_file", CPU, *words]) == 2
    assert calibrate(tmp_path / "out", model=SKEWED, config=DPU) == 0
    assert check(tmp_path / "out", "--dpu_accuracy", "high", model=SKEWED) == 5
    assert (
        "--dpu_accuracy high: these results were calibrated without it"
        in capsys.readouterr().err
    )
    with pytest.raises(UsageError, match="is not a level"):
        quantizer.calibrate(load_model(SKEWED).module, DPU, [], dpu_accuracy="higher")
