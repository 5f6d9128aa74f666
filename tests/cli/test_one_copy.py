"""A large model of a Python file is in memory once, and gives the results of a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended_except
from support.runs import calibrate, check
from torch import nn

from quantizer.cli.main import run_command
from quantizer.config.algorithms import ALGORITHMS
from quantizer.graph.ir import Graph
from quantizer.graph.tracing import parameters
from quantizer.graph.tracing.trace import trace
from quantizer.storage.deferred_tensor import DeferredTensor

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.RMSNorm(16), nn.Linear(16, 2))


def calibration_data():
    torch.manual_seed(1)
    return [torch.randn(8, 16)] * 2
"""
INT8 = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
INPUT = {"dtype": "int8", "qscheme": "per_tensor"}
FILES = ("weights.safetensors", "quant_info.json", "graph.json", "statistics.safetensors")


def written(folder: Path) -> str:
    """The path of the model's file."""
    file = folder / "model.py"
    file.write_text(MODEL)
    return str(file)


USUAL = (None, "gptq", "awq", "rotation")
"""GPTAQ and Qronos read weights as GPTQ does, and SmoothQuant as AWQ."""


@pytest.mark.parametrize("algorithm", extended_except([None, *ALGORITHMS], *USUAL))
def test_views_of_weights_give_the_same_files(
    algorithm: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = written(tmp_path), tmp_path / "config.json"
    document: dict[str, Any] = {"global_quant_config": {"weight": INT8, "input_tensors": INPUT}}
    if algorithm is not None:
        document["algo_config"] = {"name": algorithm}
    config.write_text(json.dumps(document))
    graphs: list[Graph] = []
    with_views = parameters.with_views

    def recorded(graph: Graph) -> Graph:
        graphs.append(with_views(graph))
        return graphs[-1]

    monkeypatch.setattr("quantizer.cli.session.with_views", recorded)
    for place, least in (("copies", 1 << 16), ("views", 0)):
        monkeypatch.setattr(parameters, "MOST_BYTES_IN_MEMORY", least)
        monkeypatch.setattr(parameters, "LEAST_BYTES_OF_VIEW", least)
        assert calibrate(tmp_path / place, model=model, config=str(config)) == 0
        assert check(tmp_path / place, model=model) == 0
    assert [graph.is_deferred for graph in graphs] == [False, False, True, True]
    for name in (*FILES, "report.json", "layers.csv"):
        copies, views = ((tmp_path / place / name) for place in ("copies", "views"))
        assert copies.read_bytes() == views.read_bytes(), name


def test_widths_are_chosen_from_the_gradients_of_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = written(tmp_path), tmp_path / "config.json"
    config.write_text(json.dumps({"global_quant_config": {"weight": INT8}}))
    command = ["analyze", "--config_file", str(config), "--model", model, "--json"]
    printed: list[str] = []
    for least in (1 << 16, 0):
        monkeypatch.setattr(parameters, "MOST_BYTES_IN_MEMORY", least)
        monkeypatch.setattr(parameters, "LEAST_BYTES_OF_VIEW", least)
        assert run_command([*command, "--budget", "5", "--passes", "fast"]) == 0
        printed.append(capsys.readouterr().out)
    assert json.loads(printed[0])["mixed"]["mean_bits"] <= 5
    assert printed[0] == printed[1]


def test_a_view_is_the_tensor_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(8, 8)
    graph = trace(layer, (torch.randn(2, 8),))
    assert parameters.with_views(graph) is graph
    monkeypatch.setattr(parameters, "MOST_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(parameters, "LEAST_BYTES_OF_VIEW", layer.weight.nbytes)
    viewed = parameters.with_views(graph)
    weight = viewed.tensors["weight"]
    assert isinstance(weight, DeferredTensor)
    assert weight.load().data_ptr() == layer.weight.data_ptr()
    assert not isinstance(viewed.tensors["bias"], DeferredTensor)
