"""A packed folder as the model of a run: calibration, test mode, an export and a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.llamas import text_llama
from support.runs import differing

from quantizer.calibration.events import RunStage
from quantizer.cli.main import run_command
from quantizer.results.checkpoint import Checkpoints
from quantizer.sources.hugging_face.loader import load_hugging_face

pytestmark = pytest.mark.slow

LAYER = "model.layers.0.mlp.down_proj"
ROWS = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
CONFIG = {
    "global_quant_config": {"weight": ROWS},
    "exclude": ["kind:embedding", "kind:head"],
    "algo_config": {"name": "gptq"},
}
DATA = ["--data", "book.txt", "--seq_len", "16"]
MODEL = ["--model", "packed"]


class KilledError(Exception):
    """The process dies here."""


def report(folder: str) -> Any:
    return json.loads(Path(folder, "report.json").read_text())


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `packed`, a LLaMA in 4 bits that `quantizer run` has written to `first`."""
    place = tmp_path_factory.mktemp("packed")
    text_llama(place)
    (place / "int8.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        first = ["--to", "w4", *DATA, "--output_dir", "first", "-q"]
        assert run_command(["run", "my_llama", *first]) == 0
    (written,) = (place / "first" / "export").glob("*compressed-tensors")
    written.rename(place / "packed")
    return place


@pytest.fixture
def packed(packed_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder `packed` beside its data, in the working directory."""
    shutil.copytree(packed_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "packed"


def test_a_packed_folder_is_calibrated_tested_and_exported(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calib = ["--quant_mode", "calib", "--config_file", "int8.json", *MODEL, *DATA]
    assert run_command([*calib, "--output_dir", "second"]) == 0
    remark = "packed is quantized by compressed-tensors: 7 tensors dequantized"
    assert capsys.readouterr().err.count(remark) == 1
    test = ["--quant_mode", "test", *MODEL, *DATA, "--output_dir", "second"]
    held_back = ["--skip_len", "35"]  # of the samples that the first run was measured on
    assert run_command([*test, *held_back, "--deploy", "compressed-tensors", "-q"]) == 0
    # The float model here is what the first run has measured as the quantized one
    before, after = (report(folder)["pairs"]["perplexity"] for folder in ("first", "second"))
    assert after["float"] == before["quantized"]
    (written,) = Path("second", "export").glob("*compressed-tensors")
    settings = json.loads((written / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    assert group["weights"]["num_bits"] == 8
    stored = load_file(written / "model.safetensors")
    assert f"{LAYER}.weight_packed" in stored
    codes_in_four_bits = load_file(packed / "model.safetensors")[f"{LAYER}.weight_packed"]
    assert stored[f"{LAYER}.weight_packed"].shape[1] == 2 * codes_in_four_bits.shape[1]
    dequantized = load_hugging_face(packed).get_parameter(f"{LAYER}.weight").load()
    again = load_hugging_face(written).get_parameter(f"{LAYER}.weight").load()
    assert not torch.equal(again, dequantized)
    assert (again - dequantized).abs().max() < 0.02 * dequantized.abs().max()


def test_a_run_on_it_is_resumed(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calib = ["--quant_mode", "calib", "--config_file", "int8.json", *MODEL, *DATA, "-q"]
    assert run_command([*calib, "--output_dir", "whole"]) == 0
    plain = Checkpoints.advanced
    stages: list[RunStage] = []

    def stop(self: Checkpoints, stage: RunStage) -> None:
        plain(self, stage)
        stages.append(stage)
        if len(stages) == 2:
            raise KilledError

    monkeypatch.setattr(Checkpoints, "advanced", stop)
    parts = [*calib, "--output_dir", "parts"]
    assert run_command(parts) == 3  # what this file raises counts as the user's
    assert run_command([*parts, "--resume"]) == 0
    assert not differing(Path("whole"), Path("parts"))
