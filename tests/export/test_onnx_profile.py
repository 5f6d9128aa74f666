"""`--onnx_profile`: what `fast` writes otherwise than `exact`, and what that costs and
gives.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.extended import extended
from torch import Tensor, nn

import quantizer

pytestmark = pytest.mark.slow

onnx = pytest.importorskip("onnx", reason="files are read with it (extra: onnx)")
pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

UNSIGNED: dict[str, Any] = {"symmetry": False, "signed": False}
GROUPS: dict[str, Any] = {
    "global_quant_config": {
        "weight": {
            "dtype": "int4",
            "qscheme": "per_group",
            "ch_axis": 1,
            "group_size": 32,
            "symmetric": True,
        }
    }
}


def layered(round_mode: str) -> dict[str, Any]:
    return document(
        tensor={"input": UNSIGNED, "activation": UNSIGNED | {"round_mode": round_mode}}
    )


def written(
    model: nn.Module, config: dict[str, Any], profile: str, x: Tensor, path: Path
) -> tuple[Any, Counter[str]]:
    """The verification without optimizations, which has that of a default session, and the
    operators of the file.
    """
    verified = quantizer.calibrate(model, config, [x]).export(
        "onnx", path, [x], onnx_profile=profile
    )
    return verified, Counter(node.op_type for node in onnx.load(path).graph.node)


def convolutions(act: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), act, nn.Conv2d(8, 8, 3)).eval(), torch.randn(
        4, 3, 12, 12
    )


def test_fast_rounds_as_kernels_do(tmp_path: Path) -> None:
    model, x = convolutions(nn.ReLU())
    exact, _ = written(model, layered("half_up"), "exact", x, tmp_path / "exact.onnx")
    fast, _ = written(model, layered("half_up"), "fast", x, tmp_path / "fast.onnx")
    assert exact.equal == 1.0
    assert exact.default_session.kernels.share == 0.0
    assert 'onnx_profile="fast"' in exact.default_session.kernels.summary_lines[1]
    assert 0.99 < fast.equal < 1.0
    assert fast.default_session.kernels.share == 1.0


@pytest.mark.parametrize("weight", [{}, {"dtype": "uint4", "symmetric": False}])
def test_fast_packs_weights_in_groups(weight: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "global_quant_config": {"weight": GROUPS["global_quant_config"]["weight"] | weight}
    }
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(),
        torch.randn(16, 64),
    )
    exact, plain = written(model, config, "exact", x, tmp_path / "exact.onnx")
    fast, packed = written(model, config, "fast", x, tmp_path / "fast.onnx")
    assert (plain["MatMulNBits"], plain["DequantizeLinear"]) == (0, 2)
    assert (packed["MatMulNBits"], packed["DequantizeLinear"]) == (2, 0)
    assert exact.max_difference < 1e-5
    assert fast.max_difference > 1e-4  # activations have 8 bits
    assert fast.default_session.sqnr_db > 35


@pytest.mark.parametrize("act", [nn.Hardswish(), *extended(nn.SiLU())])
def test_fast_quantizes_gates(act: nn.Module, tmp_path: Path) -> None:
    model, x = convolutions(act)
    exact, plain = written(model, layered("half_even"), "exact", x, tmp_path / "exact.onnx")
    fast, gated = written(model, layered("half_even"), "fast", x, tmp_path / "fast.onnx")
    assert gated["QuantizeLinear"] == plain["QuantizeLinear"] + 1
    assert exact.equal > 0.999
    assert fast.equal < exact.equal
    assert fast.within_step > 0.999


def in_session(path: Path, folder: Path) -> Counter[str]:
    """Return the operators of a default session."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(folder / "optimized.onnx")
    return Counter(node.op_type for node in optimized.graph.node)


class Pooled(nn.Module):
    """A hard-swish and an average over all positions, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.act = nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)).mean((-1, 2), keepdim=True))


@pytest.mark.parametrize(("scales", "gate"), [("float", "QLinearAdd"), ("poweroftwo", "Clip")])
def test_hard_swish_and_means_over_all_positions_run_in_integers(
    scales: str, gate: str, tmp_path: Path
) -> None:
    """A power of two divides 3, where the gate ends, so it is a Clip of codes."""
    torch.manual_seed(0)
    x = 8 * torch.randn(4, 3, 12, 12)
    config = layered("half_even")
    config["tensor_quantize_config"]["activation"]["scale_type"] = scales
    path = tmp_path / "fast.onnx"
    verified, _ = written(Pooled().eval(), config, "fast", x, path)
    operators = in_session(path, tmp_path)
    for op_type in (gate, "QLinearMul", "QLinearGlobalAveragePool"):
        assert operators[op_type] == 1, operators
    assert operators["Clip"] + operators["QLinearAdd"] == 1
    assert operators["HardSigmoid"] == operators["ReduceMean"] == 0
    assert operators["QuantizeLinear"] == 1
    assert verified.within_step > 0.999


@pytest.mark.parametrize("axes", [(1, 2), (2,)])
def test_other_means_stay_means(axes: tuple[int, ...], tmp_path: Path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).mean(axes, keepdim=True))

    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    verified, operators = written(
        Mean().eval(), layered("half_even"), "exact", x, tmp_path / "net.onnx"
    )
    assert operators["ReduceMean"] == 1 and operators["GlobalAveragePool"] == 0
    assert verified.equal > 0.99


@pytest.mark.parametrize(("scales", "count"), [("float", 1), *extended(("poweroftwo", 0))])
def test_a_hard_sigmoid_between_codes_keeps_its_codes(
    scales: str, count: int, tmp_path: Path
) -> None:
    """With powers of two, 1 is not the last code, so nothing would clamp a sum."""
    torch.manual_seed(0)
    x = 8 * torch.randn(4, 3, 12, 12)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardsigmoid(), nn.Conv2d(8, 8, 1)).eval()
    config = layered("half_even")
    config["tensor_quantize_config"]["activation"]["scale_type"] = scales
    path = tmp_path / "fast.onnx"
    verified, _ = written(model, config, "fast", x, path)
    assert in_session(path, tmp_path)["QLinearAdd"] == count
    assert verified.equal > 0.999
