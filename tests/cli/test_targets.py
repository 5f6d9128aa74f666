"""`quantizer targets`, and the names of destinations that people say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.cli.main import run_command
from quantizer.config.resources import presets
from quantizer.errors import UsageError
from quantizer.export.destinations import ALSO, DESTINATIONS, destination_named

Capture = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

def calibration_data():
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return "net.py"


def test_every_destination_is_listed_with_all_of_its_names(capsys: Capture) -> None:
    assert run_command(["targets"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, row in DESTINATIONS.items():
        assert ", ".join([name, *row.also]) in text
        assert row.made in text
        assert f"starts from the preset {row.preset}" in text
    assert run_command(["targets", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed.keys() == DESTINATIONS.keys()
    assert listed["onnx"]["checked_in"] == ["ONNX Runtime"]
    assert listed["gguf"]["for_transformers"] and not listed["w4"]["for_transformers"]


def test_each_name_stands_for_one_destination() -> None:
    names = [name for row in DESTINATIONS.values() for name in row.also]
    assert len(set(names)) == len(names) == len(ALSO)
    assert not DESTINATIONS.keys() & ALSO.keys()
    for name, (destination, preset) in ALSO.items():
        assert name == name.lower()
        assert destination_named(name.upper()) == (destination, preset)
        assert not preset or preset in presets()


@pytest.mark.parametrize(
    ("word", "suffix"), [("int8", ".onnx"), ("ONNX", ".onnx"), ("w8a16", ".safetensors")]
)
def test_a_run_takes_any_name(word: str, suffix: str, net: str) -> None:
    assert run_command(["run", net, "--to", word]) == 0
    written = Path("quantize_result/export").iterdir()
    assert suffix in {path.suffix for path in written}


def test_a_name_of_a_preset_excludes_another_preset(net: str, capsys: Capture) -> None:
    command = ["run", net, "--to", "q4_k_m", "--preset", "gguf_q8_0"]
    assert run_command(command) == 2
    error = capsys.readouterr().err
    assert "--to q4_k_m stands for --preset gguf_q4_k_m, and --preset gguf_q8_0 is giv" in error


def test_an_unknown_name_gets_the_nearest_of_all_names(net: str, capsys: Capture) -> None:
    assert run_command(["run", net, "--to", "tflit"]) == 2
    assert "did you mean tflite?" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no destination 'tflit'") as refused:
        destination_named("tflit")
    assert refused.value.help == "did you mean tflite?"
