"""`--onnx_profile tensorrt` and `npu`: their files keep the rules of the engines, and what these
do not take is refused by tensor.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.extended import extended, extended_except
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from support.runs import ROOT
from support.toys import TOYS, built
from torch import Tensor, nn

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="files are written with it (extra: onnx)")

from export.test_onnx_matrix import FUNCTIONS, LAYERS, Branches
from export.test_onnx_networks import CASES
from support.profile_rules import File, npu_faults, tensorrt_faults

import quantizer
from quantizer.config.model import QuantizationSpec
from quantizer.errors import UsageError
from quantizer.export.agreement import Verification
from quantizer.export.exporter import exporter_of
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_files")]

Given = tuple[nn.Module, tuple[Any, ...]]
REFUSED = ("partial", "transposed")
"""Toys with a float input beside quantized weights, and with groups that have no axis."""


def preset(name: str, bits: int = 8) -> dict[str, Any]:
    """A preset, with activations of another width."""
    config: dict[str, Any] = json.loads((ROOT / "configs" / f"{name}.json").read_text("utf-8"))
    del config["$schema"]
    if bits != 8:
        for role in ("input", "activation"):
            config["tensor_quantize_config"][role]["bit_width"] = bits
    return config


KINDS: dict[str, dict[str, Any]] = {
    "uint8": preset("npu_int8"),
    "uint16": preset("npu_int8", bits=16),
    "shifted": preset("tensorrt_int8"),
    "powers": preset("dpu"),
}
"""Configs for NPUs."""


def branches(readers: dict[str, Any], *, made: bool) -> Given:
    torch.manual_seed(0)
    modules = [make(True) for make in readers.values()] if made else list(readers.values())
    return Branches(modules).eval(), (torch.randn(4, 8, 6, 6),)


def network(name: str) -> Given:
    """A network of the export tests with a call."""
    if name == "layers":
        return branches(LAYERS, made=True)
    if name == "functions":
        return branches(FUNCTIONS, made=False)
    if name in CASES:
        build, _, batch, _ = CASES[name]
        torch.manual_seed(0)
        return build().eval(), (batch,)
    toy = built(name)
    return toy.module, toy.call(2)[0]


POSITIONAL = [name for name, make in TOYS.items() if name != "nested_inputs"]
NETWORKS = [*POSITIONAL, *CASES, "layers", "functions"]


def written(
    name: str, config: dict[str, Any], profile: str, path: Path
) -> tuple[Verification, File]:
    module, args = network(name)
    result = quantizer.calibrate(module, config, [args])
    found = result.export("onnx", path / "net.onnx", onnx_profile=profile)
    return found, File.read(path / "net.onnx")


@pytest.mark.parametrize(
    "name",
    extended_except(
        [name for name in NETWORKS if name not in REFUSED],
        *("attention", "layers", "functions", "rows divided by their norm"),
    ),
)
def test_a_file_for_tensorrt_keeps_its_rules(name: str, tmp_path: Path) -> None:
    found, file = written(name, preset("tensorrt_int8"), "tensorrt", tmp_path)
    assert tensorrt_faults(file) == []
    assert found.default_session is not None
    most = max((row.most_steps for row in found.default_session.layers), default=0)
    assert most <= 1


@pytest.mark.parametrize(
    ("name", "kind"),
    extended_except(
        [(name, kind) for name in NETWORKS if name not in REFUSED for kind in KINDS],
        ("residual", "powers"),
        ("gated", "uint8"),
        ("reused", "shifted"),
        ("layers", "uint8"),
        ("functions", "uint16"),
    ),
)
def test_a_file_for_an_npu_keeps_its_rules(name: str, kind: str, tmp_path: Path) -> None:
    found, file = written(name, KINDS[kind], "npu", tmp_path)
    assert npu_faults(file, powers=kind == "powers") == []
    assert found.default_session is not None
    most = max((row.most_steps for row in found.default_session.layers), default=0)
    assert most <= 1


def test_the_rules_see_what_a_file_for_onnx_runtime_does_otherwise(tmp_path: Path) -> None:
    _, file = written("residual", preset("cpu_int8"), "exact", tmp_path)
    assert any("zero point 0" in fault for fault in tensorrt_faults(file))
    assert any("bias" in fault for fault in tensorrt_faults(file))
    assert any("zero points of 0" in fault for fault in npu_faults(file))
    assert any("no power of two" in fault for fault in npu_faults(file, powers=True))


def test_the_remarks_say_what_quantize_linear_does_otherwise(tmp_path: Path) -> None:
    found, _ = written("residual", preset("dpu"), "npu", tmp_path)
    rounding, narrow = found.remarks[1:3]
    assert "half_up" in rounding
    assert "narrow_range" in narrow
    assert found.default_session is not None
    kernels = found.default_session.kernels
    assert kernels is not None
    assert "multiplications of quantized values" in kernels.summary_lines[0]


@pytest.mark.parametrize("opset", [21, *extended(23)])
def test_int8_before_a_reshape_loads_in_every_operator_set(opset: int, tmp_path: Path) -> None:
    """A default session of ONNX Runtime cannot load it from 21 on."""
    config = preset("tensorrt_int8") | {"onnx_opset_version": opset}
    found, file = written("functions", config, "tensorrt", tmp_path)
    assert file.model.opset_import[0].version == opset
    assert found.equal == 1


ACTIVATION = ("relu", "activation")
WEIGHTS = ("linear", "weights")
REASONS: dict[str, tuple[str, tuple[str, str], dict[str, Any], str]] = {
    "unsigned": ("tensorrt", ACTIVATION, {"signed": False}, "not int8 with the zero point 0"),
    "asymmetric": ("tensorrt", ACTIVATION, {"symmetric": False}, "not int8 with the zero"),
    "narrow": ("tensorrt", ACTIVATION, {"narrow_range": True}, "has a narrow range"),
    "half up": ("tensorrt", ACTIVATION, {"round_mode": "half_up"}, "is rounded by half_up"),
    "16 bits": ("tensorrt", ACTIVATION, {"bit_width": 16}, "has 16 bits; TensorRT takes 8"),
    "4 bits": ("npu", ACTIVATION, {"bit_width": 4}, "has 4 bits; an NPU takes 8 or 16"),
    "dynamic": ("npu", ACTIVATION, {"is_dynamic": True}, "has a dynamic range"),
    "fp8": ("tensorrt", ACTIVATION, {"dtype": "fp8_e4m3"}, "is fp8_e4m3"),
    "floor": ("npu", ACTIVATION, {"round_mode": "floor"}, "is rounded by floor"),
    "shift": (
        "npu",
        ACTIVATION,
        {"scale_type": "poweroftwo", "symmetric": False},
        "has power-of-two scales and a zero point",
    ),
    "wide weights": ("npu", WEIGHTS, {"bit_width": 16}, "has 16 bits; an NPU takes 8 or fewer"),
    "float weights": ("tensorrt", WEIGHTS, {"dtype": "fp4"}, "is fp4; TensorRT takes integers"),
    "unsigned weights": ("npu", WEIGHTS, {"signed": False}, "not int8 with the zero point 0"),
    "groups": (
        "tensorrt",
        WEIGHTS,
        {"qscheme": "per_group", "ch_axis": 1, "group_size": 4},
        "has a scale for each group",
    ),
    "inputs": (
        "tensorrt",
        WEIGHTS,
        {"qscheme": "per_channel", "ch_axis": 1},
        "has scales along axis 1",
    ),
}


@cache
def two_layers() -> Graph:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return trace(module.eval(), (torch.randn(2, 8),))


def specs_of(graph: Graph) -> dict[tuple[str, str], QuantizationSpec]:
    """Int8 specs of all values and weights."""
    specs = {}
    for node in graph.nodes:
        if node.op == "input":
            specs[node.name, "input"] = QuantizationSpec()
        elif node.is_float and node.op != "parameter":
            specs[node.name, "activation"] = QuantizationSpec()
        if "weight" in node.params:
            specs[node.name, "weights"] = QuantizationSpec()
    return specs


def first_of(graph: Graph, op: str) -> str:
    return next(node.name for node in graph.nodes if node.op == op)


@pytest.mark.parametrize("name", REASONS)
def test_what_an_engine_does_not_take_is_told_by_tensor(name: str) -> None:
    profile, (op, role), changes, why = REASONS[name]
    graph = two_layers()
    specs = specs_of(graph)
    layer = first_of(graph, op)
    exporter = exporter_of("onnx", {"onnx_profile": profile})
    assert [*exporter.refusals(graph, specs, -1)] == []
    specs[layer, role] = QuantizationSpec(**changes)
    refusals = [*exporter.refusals(graph, specs, -1)]
    assert {(refusal.layer, refusal.role) for refusal in refusals} == {(layer, role)}
    assert any(why in refusal.why for refusal in refusals)
    assert all(refusal.help for refusal in refusals)


def test_weights_beside_a_float_input_are_refused() -> None:
    graph = two_layers()
    specs = specs_of(graph)
    entry = first_of(graph, "input")
    del specs[entry, "input"]
    (refusal,) = exporter_of("onnx", {"onnx_profile": "tensorrt"}).refusals(graph, specs, -1)
    assert (refusal.layer, refusal.role) == (first_of(graph, "linear"), "weights")
    assert "meets a float input" in refusal.why


@pytest.mark.parametrize("profile", ["tensorrt", "npu"])
def test_a_grouped_transposed_convolution_needs_one_scale(profile: str, tmp_path: Path) -> None:
    name = "npu_int8" if profile == "npu" else "tensorrt_int8"
    with pytest.raises(UsageError, match="transposed convolution with groups") as refused:
        written("transposed", preset(name), profile, tmp_path)
    assert f'onnx_profile="{profile}"' in str(refused.value)
    assert "set per_channel to false" in str(refused.value.help)


class SmallWeights(nn.Module):
    """A linear layer whose bias is far larger than its products."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        with torch.no_grad():
            self.linear.weight[1:] *= factor
            self.linear.bias.fill_(100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def narrow_weights(**weights: Any) -> tuple[nn.Module, dict[str, Any], Tensor]:
    torch.manual_seed(0)
    module = SmallWeights(1e-9).eval()
    config = document(tensor={"weights": weights})
    return module, config, torch.randn(16, 8)


@pytest.mark.parametrize("scale_type", ["float", "poweroftwo"])
def test_a_channel_with_too_fine_steps_gets_a_coarser_scale(
    scale_type: str, tmp_path: Path
) -> None:
    module, config, x = narrow_weights(per_channel=True, scale_type=scale_type)
    result = quantizer.calibrate(module, config, [x])
    found = result.export("onnx", tmp_path / "net.onnx", onnx_profile="npu")
    file = File.read(tmp_path / "net.onnx")
    assert npu_faults(file) == []
    (weight,) = [node for node in file.nodes("DequantizeLinear") if ".weights" in node.name]
    assert file.scale_is_a_power(weight) == (scale_type == "poweroftwo")
    assert found.within_step == 1


def test_a_bias_that_no_int32_holds_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 4).eval()
    with torch.no_grad():
        module.weight *= 1e-9
        module.bias.fill_(100.0)
    config = document(tensor={"weights": {"per_channel": False}})
    result = quantizer.calibrate(module, config, [torch.randn(16, 8)])
    with pytest.raises(UsageError, match=r"bias of Linear::Linear.* does not fit int32"):
        result.export("onnx", tmp_path / "net.onnx", onnx_profile="npu")
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize("to", ["tensorrt", "npu"])
def test_one_call_writes_the_form_of_the_engine(to: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    made = quantizer.quantize(module, [x], to=to, folder=tmp_path)
    file = File.read(made.path)
    assert (tensorrt_faults(file) if to == "tensorrt" else npu_faults(file)) == []
    assert "1 of 1 multiplications of quantized values" in str(made)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1 of 1 multiplications of quantized values" in page
    assert "without kernels of integers" in page


def test_a_destination_keeps_to_its_profile() -> None:
    with pytest.raises(UsageError, match='to="npu" writes onnx_profile="npu"') as refused:
        quantizer.quantize(nn.Linear(2, 2), [torch.ones(1, 2)], to="npu", onnx_profile="fast")
    assert 'to="onnx"' in str(refused.value.help)
