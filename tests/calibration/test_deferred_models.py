"""Models whose weights stay in their files: the results are those of the same model in memory,
at a bounded cost.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended, extended_except
from support.llamas import llama, saved, tokens
from torch import Tensor

from quantizer.cli.main import run_command
from quantizer.export.targets import EXPORTERS
from quantizer.sources.hugging_face.loader import load_hugging_face, read_checkpoint
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.folder_list import LIST_FILE

pytestmark = pytest.mark.slow

GROUPS = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 32,
    "symmetric": True,
}
ROWS = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "weight-only": {"global_quant_config": {"weight": GROUPS}},
    "fp8": {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
    "bfloat16": {"global_quant_config": {"weight": {"dtype": "bfloat16"}}},
    "static": {
        "global_quant_config": {
            "weight": ROWS,
            "input_tensors": {"dtype": "int8", "qscheme": "per_tensor"},
        }
    },
    "gptq": {"global_quant_config": {"weight": GROUPS}, "algo_config": {"name": "gptq"}},
    "awq": {"global_quant_config": {"weight": GROUPS}, "algo_config": {"name": "awq"}},
    "smooth": {
        "global_quant_config": {"weight": ROWS},
        "pre_quant_opt_config": {"name": "smooth"},
    },
    "rotation": {
        "global_quant_config": {"weight": GROUPS},
        "pre_quant_opt_config": {"name": "rotation"},
    },
}
TESTED = ("weight-only", "static", "rotation")
"""Configs whose results test mode is run on: with float inputs, quantized ones, and layers that
are inserted.
"""
LARGEST = 96 * 64 * 4
"""Bytes of the largest weight of a layer."""
IN_MEMORY = """
from transformers import LlamaForCausalLM

def model():
    network = LlamaForCausalLM.from_pretrained("model")
    network.config.use_cache = False
    return network
"""
DATA = """
import torch

def data():
    return [{"input_ids": torch.arange(16).view(2, 8) * step % 64} for step in (1, 3)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    saved(tmp_path / "model", llama(), max_shard_size="20KB")
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 3
    (tmp_path / "in_memory.py").write_text(IN_MEMORY, encoding="utf-8")
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_the_model_that_transformers_loads(folder: Path) -> None:
    ours, theirs = (
        load_hugging_face(folder / "model"),
        read_checkpoint(folder / "model", "LlamaForCausalLM")[0],
    )
    assert all(isinstance(parameter, DeferredTensor) for parameter in ours.parameters())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for (name, x), (other, y) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert (name, x.dtype) == (other, y.dtype)
        assert torch.equal(x, y)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    (batch,) = tokens(1)
    with torch.no_grad():
        assert torch.equal(ours(**batch).logits, theirs(**batch).logits)


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {"dtype": torch.bfloat16}])
def test_tied_and_narrow_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path, llama(**settings).to(settings.get("dtype")))
    model = load_hugging_face(tmp_path)
    assert isinstance(model.lm_head.weight, DeferredTensor)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (
        "tie_word_embeddings" in settings
    )
    assert model.lm_head.weight.dtype == settings.get("dtype", torch.float32)


def test_what_is_not_simply_stored_is_read_by_transformers(folder: Path) -> None:
    """A folder whose files have another dtype than the config."""
    settings = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    model = load_hugging_face(folder / "model")
    assert not any(isinstance(parameter, DeferredTensor) for parameter in model.parameters())
    assert next(model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", extended_except(CONFIGS, "weight-only", "rotation"))
def test_results_are_those_in_memory(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the graph of a folder says which code was traced
    monkeypatch.setattr("quantizer.results.graph_file.model_code", lambda *call: None)
    (folder / "config.json").write_text(
        json.dumps(CONFIGS[name] | {"exclude": ["kind:head", "kind:embedding"]})
    )
    made = {}
    for model in ("model", "in_memory.py"):
        out = ["--model", model, "--output_dir", f"out_{model}", "--data", "data.py:data", "-q"]
        assert run_command(["--quant_mode", "calib", "--config_file", "config.json", *out]) == 0
        if name in TESTED:
            assert run_command(["--quant_mode", "test", *out]) == 0
        files = sorted((folder / f"out_{model}").iterdir())
        made[model] = {
            file.name: file.read_bytes()
            for file in files
            if not file.name.startswith(("run.", "report.", LIST_FILE))
        }
    assert made["model"].keys() == made["in_memory.py"].keys()
    assert [
        name for name, content in made["model"].items() if content != made["in_memory.py"][name]
    ] == []


def test_results_in_four_bits_are_an_eighth_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scale of float32 for each 128 weights; what describes them does not grow with
    them.
    """
    saved(tmp_path / "model", llama(hidden_size=256, intermediate_size=1024))
    groups = GROUPS | {"group_size": 128}
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    (tmp_path / "config.json").write_text(
        json.dumps({"global_quant_config": {"weight": groups}})
    )
    monkeypatch.chdir(tmp_path)
    command = [
        "--quant_mode",
        "calib",
        "--config_file",
        "config.json",
        "--model",
        "model",
        "--data",
        "data.py:data",
    ]
    assert run_command([*command, "-q"]) == 0
    model, results = (
        sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        for name in ("model", "quantize_result")
    )
    assert results < model * (4 + 32 / 128) / 32 * 1.02


@pytest.fixture
def most_alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The most bytes of loaded tensors that are in memory at once, each counted once."""
    alive: dict[int, int] = {}
    found = {"bytes": 0}
    load = DeferredTensor.load

    def watched(self: DeferredTensor) -> Tensor:
        tensor = load(self)
        key = id(tensor)
        if key not in alive:
            alive[key] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, key)
        found["bytes"] = max(found["bytes"], sum(alive.values()))
        return tensor

    monkeypatch.setattr(DeferredTensor, "load", watched)
    yield found


@pytest.mark.parametrize("name", ["gptq", *extended("weight-only")])
def test_few_weights_are_in_memory_at_once(
    name: str, most_alive: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "model", llama(num_hidden_layers=2))
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    out = ["--model", "model", "--data", "data.py:data", "-q"]
    assert run_command(["--quant_mode", "calib", "--config_file", "config.json", *out]) == 0
    assert run_command(["--quant_mode", "test", *out]) == 0
    assert most_alive["bytes"] <= 4 * LARGEST  # of 10 in two layers


@pytest.mark.parametrize(
    "target", [name for name, exporter in EXPORTERS.items() if exporter.by_tensor]
)
def test_files_for_engines_are_made_weight_by_weight(
    target: str, most_alive: dict[str, int], folder: Path
) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(package, reason="the target needs it")
    content = CONFIGS["weight-only"] | {"exclude": ["kind:head", "kind:embedding"]}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    out = ["--model", "model", "--data", "data.py:data", "-q"]
    assert run_command(["--quant_mode", "calib", "--config_file", "config.json", *out]) == 0
    assert run_command(["--quant_mode", "test", *out, "--deploy", target]) == 0
    assert most_alive["bytes"] <= 4 * LARGEST
