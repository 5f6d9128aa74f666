"""Exported files state what made them, and two runs write the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.api.result import Result
from quantizer.config.document.document import Text
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.load import load_text
from quantizer.storage.safetensors_file import read_metadata

CONFIG = {
    "global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(3, 2)

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"boxes": self.left(image), "scores": self.right(mask)}


def calibrated() -> Result:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 3, generator=generator)
    return quantizer.calibrate(Net().eval(), CONFIG, [(inputs[0], inputs[1])])


@pytest.fixture(scope="module")
def result() -> Result:
    return calibrated()


@pytest.fixture(scope="module")
def expected(result: Result) -> dict[str, Any]:
    """What each file states."""
    config = load_text(Text("net.json", json.dumps(CONFIG))).require()
    metrics = {}
    for name, value in result.test().metrics.items():
        metrics[name] = float(f"{value:.6g}")
    return {
        "producer": "quantizer",
        "version": quantizer.__version__,
        "config": resolved_document(config),
        "metrics": metrics,
    }


def written_twice(target: str, result: Result, folder: Path) -> Path:
    """A file, after a check that another run writes the same bytes."""
    path = folder / f"net.{target}"
    result.export(target, path)
    again = folder / f"again.{target}"
    calibrated().export(target, again)
    assert path.read_bytes() == again.read_bytes()
    return path


def test_onnx_states_its_origin(
    result: Result, expected: dict[str, Any], tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx", reason="the target needs it (extra: onnx)")
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    model = onnx.load(written_twice("onnx", result, tmp_path))
    stated = {entry.key: entry.value for entry in model.metadata_props}
    assert list(stated) == ["producer", "version", "config", "metrics", "processors"]
    # All weights of this network are small enough for int8 on every processor, or uint8
    assert stated.pop("processors") == "any"
    for name in ("config", "metrics"):
        assert "\n" not in stated[name]
        stated[name] = json.loads(stated[name])
    # Test mode runs what ONNX Runtime rounds in addition, so its figures are others
    assert stated["metrics"].keys() == expected["metrics"].keys()
    assert {**stated, "metrics": expected["metrics"]} == expected


def test_programs_state_their_origin_and_keep_the_names_of_the_model(
    result: Result, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = written_twice("pt2_float", result, tmp_path)
    files = {"quantizer.json": ""}
    program = torch.export.load(path, extra_files=files)
    assert json.loads(files["quantizer.json"]) == expected
    assert program.graph_signature.user_inputs == ("image", "mask")
    assert program.graph_signature.user_outputs == ("boxes", "scores")
    outputs = program.module()(torch.ones(4, 3), torch.ones(4, 3))
    assert list(outputs) == ["boxes", "scores"]


def test_safetensors_state_their_origin(
    result: Result, expected: dict[str, Any], tmp_path: Path
) -> None:
    path = written_twice("safetensors", result, tmp_path)
    assert json.loads(read_metadata(path)["quantizer"])["origin"] == expected
