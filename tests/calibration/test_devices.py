"""Everything on a second device as on the CPU: nothing is mixed, nothing large goes back. See
`strict_device`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.configs import document
from support.device_runs import (
    CPU,
    GROUPS,
    HIERARCHICAL,
    LAYERED,
    images,
    language_model,
    network,
    run,
)
from support.extended import extended, extended_except
from support.llamas import llama, saved, tokens
from support.strict_device import COPY, STRICT, Transfer, recorded, tensor
from torch import Tensor, nn

from quantizer import ModelQuantizer
from quantizer.cli.main import run_command
from quantizer.graph.tracing.parameters import move_module
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.storage.deferred_tensor import DeferredTensor, bytes_of, read_tensor

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _python_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", tensor)


GIVE_TO_THE_CPU = {
    "algorithms/bias_correction/bias_correction.py:_correct",
    "calibration/statistics.py:observe",
    "calibration/statistics.py:sentence",
    "algorithms/finetuning/layers.py:solve",
    "algorithms/gptq/rows.py:_index",
    "algorithms/gptq/rows.py:by_first",
    "comparison/extents.py:column_energy",
    "comparison/extents.py:of",
    "comparison/extents.py:ends_along",
    "comparison/noise.py:of",
    "comparison/output_comparison.py:see",
    "algorithms/equalization/equalization.py:__init__",
    "nn/quantizer.py:with_qparams",
    "nn/quantizer.py:encoded",
    "numerics/metrics.py:row_energies",
    "observers/device_batch.py:copied",
    "observers/observed_batch.py:counted",
    "observers/observed_batch.py:of",
}
"""What moves more than single numbers: ranges, histograms, means and scales; the energies and
the largest magnitudes of samples; what tells parts of outputs apart; which scale a column has,
once for a layer; and weights, once, for their codes.
"""
SPILLS = "storage/deferred_tensor.py:bytes_of"
"""What moves values beyond the budget of an activation store into files."""


def large(transfers: list[Transfer]) -> set[str]:
    """Where more than single numbers went to the CPU."""
    return {each.place for each in transfers if each.kind == COPY and each.values > 1}


def same(config: Any, model: str, dtype: torch.dtype, finetune: str | None = None) -> None:
    """Run on both devices and compare."""
    with recorded() as transfers:
        ours = run(model, dtype, STRICT, config, finetune)
    theirs = run(model, dtype, CPU, config, finetune)
    assert ours.found.keys() == theirs.found.keys()
    for key, value in ours.found.items():
        assert torch.equal(value.cpu(), theirs.found[key]), key
    assert ours.scores.metrics == theirs.scores.metrics
    assert large(transfers) <= GIVE_TO_THE_CPU


LAYERED_RUNS = [*zip(LAYERED, DTYPES * 3, strict=True)]


@pytest.mark.parametrize(
    ("name", "dtype"), extended_except(LAYERED_RUNS, *LAYERED_RUNS[1:5:2], LAYERED_RUNS[0])
)
def test_observers_and_passes(name: str, dtype: torch.dtype) -> None:
    same(LAYERED[name], "network", dtype)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("adaround", torch.float32), *extended(("adaquant", torch.bfloat16))]
)
def test_fast_finetuning(mode: str, dtype: torch.dtype) -> None:
    same(document(), "network", dtype, mode)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dynamic", torch.bfloat16),
        ("qronos", torch.bfloat16),
        ("awq", torch.bfloat16),
        ("rotation", torch.bfloat16),
        *extended(
            ("smoothquant", torch.float32),  # the other dtype is below, as of gptq and gptaq
            ("gptq", torch.float32),
            ("gptq with open groups", torch.bfloat16),
            ("gptaq", torch.float32),
            ("awq", torch.float32),
        ),
    ],
)
def test_algorithms(name: str, dtype: torch.dtype) -> None:
    same(HIERARCHICAL[name], "language_model", dtype)


@pytest.mark.parametrize("name", ["gptq", "smoothquant", *extended("gptaq")])
def test_activations_beyond_the_budget_come_back_to_their_device(name: str) -> None:
    with recorded() as transfers:
        ours = run("language_model", torch.bfloat16, STRICT, HIERARCHICAL[name], memory=1)
    theirs = run("language_model", torch.bfloat16, CPU, HIERARCHICAL[name])
    assert ours.found.keys() == theirs.found.keys()
    assert all(torch.equal(value.cpu(), theirs.found[key]) for key, value in ours.found.items())
    places = large(transfers)
    assert (SPILLS in places) == (name != "smoothquant"), (
        "one pass over each batch keeps nothing"
    )
    assert places <= GIVE_TO_THE_CPU | {SPILLS}


NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(4, 8, 3), nn.Linear(8, 5)
    def forward(self, x):
        return self.fc(F.avg_pool2d(F.leaky_relu(F.hardswish(self.conv(x)), 0.1), 3).mean((2, 3)))

model = Net
"""


def test_the_shell_writes_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With bias correction, the DPU's approximations and its integers, and test mode on the
    other device.
    """
    model = tmp_path / "net.py"
    model.write_text(NETWORK)
    given = ["--model", str(model), "--data", "random:4x4x8x8", "-q"]
    found = {}
    for device in ("cpu", "strict"):
        folder = [*given, "--output_dir", str(tmp_path / device), "--device", device]
        assert run_command(["--quant_mode", "calib", *folder]) == 0
        found[device] = json.loads((tmp_path / device / "quant_info.json").read_text())
    assert found["strict"] == found["cpu"]  # with the checksums of the other files
    reports = []
    for device in ("cpu", "strict"):
        capsys.readouterr()
        folder = [*given, "--output_dir", str(tmp_path / "cpu"), "--device", device]
        assert (
            run_command(
                ["--quant_mode", "test", "--exact", "--json", "--deploy", "pt2_float", *folder]
            )
            == 0
        )
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]


def eight_tokens() -> list[dict[str, Tensor]]:
    """Calibration data of the command line."""
    return tokens()


def many_tokens() -> list[dict[str, Tensor]]:
    """More batches than a weight may be read."""
    return tokens(10)


def test_weights_in_files_give_the_same_bytes(tmp_path: Path) -> None:
    """The attention of torch is laid out in another way, so that numbers of modules are not
    compared.
    """
    folder, found = saved(tmp_path / "model", language_model(torch.bfloat16)), []
    (tmp_path / "config.json").write_text(
        json.dumps({"global_quant_config": {"weight": GROUPS}})
    )
    for device in ("cpu", "strict"):
        place = tmp_path / device
        given = [
            "--model",
            str(folder),
            "--config_file",
            str(tmp_path / "config.json"),
            "--device",
            device,
            "-q",
        ]
        given += ["--data", f"{__file__}:eight_tokens", "--output_dir", str(place)]
        assert run_command(["--quant_mode", "calib", *given]) == 0
        files = [
            load_file(place / name) for name in ("weights.safetensors", "qparams.safetensors")
        ]
        found.append(sorted(bytes(bytes_of(each)) for file in files for each in file.values()))
        assert "strict" not in (place / "LlamaForCausalLM.py").read_text()
    assert found[0] == found[1]
    assert run_command(["--quant_mode", "test", *given]) == 0


def test_weights_in_files_are_rounded_as_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is read for its check, its digest, its range, the layers before it and its
    rounding, however many batches there are.
    """
    # Only the graph of a folder says which code was traced
    monkeypatch.setattr("quantizer.results.graph_file.model_code", lambda *call: None)
    folder, found, ahead = saved(tmp_path / "model", llama()), [], list[Tensor]()
    prefetch, reads = DeferredTensor.prefetch, Counter[int]()

    def counted(file: int, start: int, *rest: Any) -> Tensor:
        reads[start] += 1
        return read_tensor(file, start, *rest)

    monkeypatch.setattr(
        DeferredTensor, "prefetch", lambda tensor: ahead.append(tensor) or prefetch(tensor)
    )
    monkeypatch.setattr("quantizer.storage.safetensors_file.read_tensor", counted)
    monkeypatch.setattr("quantizer.layerwise.sequential_runner._IDS_OF_A_DEVICE", 1)
    (tmp_path / "config.json").write_text(json.dumps(HIERARCHICAL["gptq"]))
    made = tmp_path / "net.py"
    made.write_text(
        "from support.llamas import llama\n\nmodel = lambda: llama(use_cache=False)\n"
    )
    for model in (folder, f"{made}:model"):
        given = ["--model", str(model), "--config_file", str(tmp_path / "config.json"), "-q"]
        given += ["--data", f"{__file__}:many_tokens", "--device", "strict", "--overwrite"]
        given += ["--output_dir", str(tmp_path / "results")]
        assert run_command(["--quant_mode", "calib", *given]) == 0
        info = json.loads((tmp_path / "results" / "quant_info.json").read_text())
        found.append(info["header"]["files"])
    assert found[0] == found[1]
    assert ahead and all(tensor.device == STRICT for tensor in ahead)
    assert 0 < max(reads.values()) <= 8 < len(many_tokens())


def test_weights_that_are_deferred_stay_so_on_a_device() -> None:
    """Each goes there when it is computed with, so that a model may be larger than the device's
    memory.
    """
    layer = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    weight, read = layer[0].weight.detach(), list[int]()
    layer[0].weight = nn.Parameter(
        DeferredTensor((3, 4), weight.dtype, lambda: read.append(1) or weight)
    )  # type: ignore[func-returns-value]
    x = torch.randn(2, 4)
    wanted = layer(x)
    read.clear()
    move_module(layer, STRICT)
    assert not read
    assert isinstance(layer[0].weight, DeferredTensor) and layer[0].weight.device == STRICT
    graph = trace(layer, (x.to(STRICT),))
    assert graph.device == STRICT and graph.is_deferred and not read
    assert torch.equal(Network(graph)(x.to(STRICT)).cpu(), wanted) and len(read) == 1
    assert torch.equal(move_module(layer, CPU)(x), wanted)


def test_a_model_in_place_keeps_all_it_has_on_its_device() -> None:
    quantizer, data = ModelQuantizer("configs/static_fp8.json"), images(torch.float32)
    found = [
        quantizer.quantize_model(network(torch.float32).to(device), data)
        for device in (STRICT, CPU)
    ]
    state, wanted = (model.state_dict() for model in found)
    assert all(value.device == STRICT for value in state.values())
    assert all(torch.equal(value.cpu(), wanted[name]) for name, value in state.items())
    given = data[0].to(STRICT)
    with recorded() as transfers:
        output = found[0](given)
    assert torch.equal(output.cpu(), found[1](data[0]))
    assert not transfers  # nothing waits for the device
