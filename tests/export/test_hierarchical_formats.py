"""Files of groups, scaled floating-point formats and dynamic ranges: equal to test mode, or
refused with layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.deployments import FILES, outputs_of
from support.extended import extended_except
from support.hierarchies import Fields, hierarchy
from support.toys import built, traced
from torch import Tensor, nn

from quantizer.calibration import observing
from quantizer.config.model import ResolvedConfig
from quantizer.errors import UsageError
from quantizer.export.deployment import Deployment
from quantizer.export.exporting import export
from quantizer.export.refusals import require_expressible
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

pytestmark = pytest.mark.slow

GROUPS: dict[str, Any] = {"bit_width": 4, "qscheme": "per_group", "group_size": 2}
UNSIGNED: dict[str, Any] = {"symmetric": False, "signed": False}
MX: dict[str, Any] = {"qscheme": "per_group", "group_size": 32, "scale_type": "e8m0"}
MX9: dict[str, Any] = MX | {"dtype": "mx9", "group_size": 16, "scale_type": "microexponent"}
WEIGHTS: dict[str, Mapping[str, Any]] = {
    "groups": GROUPS,
    "whole groups": GROUPS | {"group_size": -1},
    "asymmetric groups": GROUPS | UNSIGNED,
    "groups of rows": GROUPS | {"ch_axis": 0, "group_size": -1},
    "fp8": {"dtype": "fp8_e4m3", "qscheme": "per_channel"},
    "fp8 blocks": {"dtype": "fp8_e4m3", "qscheme": "per_block", "group_size": 3},
    "fp6": {"dtype": "fp6_e2m3"},
    "nvfp4": MX | {"dtype": "fp4", "group_size": 2, "scale_type": "e4m3"},
    "int4 with e4m3 scales": GROUPS | {"scale_type": "e4m3"},
    **{name: MX9 | {"dtype": name} for name in ("mx6", "mx9")},
    **{
        name: MX | {"dtype": name}
        for name in ("fp8_e5m2", "fp6_e3m2", "fp4", "mx_int8", "bfp16")
    },
}
INPUTS: dict[str, Mapping[str, Any]] = {
    "dynamic": {"is_dynamic": True},
    "tokens": {"is_dynamic": True, "qscheme": "per_token", **UNSIGNED},
    "mx": MX | {"dtype": "fp4", "is_dynamic": True},
    "mx9": MX9 | {"is_dynamic": True},
    "fp8 groups": {
        "dtype": "fp8_e4m3",
        "qscheme": "per_group",
        "group_size": 3,
        "is_dynamic": True,
    },
    "fp4": {"dtype": "fp4"},
    "nvfp4": MX
    | {"dtype": "fp4", "group_size": 2, "scale_type": "e4m3", "is_dynamic": "local"},
    "channels": {"qscheme": "per_channel", "ch_axis": -1},
}


def calibrated(
    original: Graph, config: ResolvedConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Deployment:
    """A network with the scales of one batch."""
    plan = resolve_plan(config, run_passes(original, config.settings), original)
    assert not any(found.severity == "error" for found in plan.diagnostics)
    calibration = observing.create_observers(plan)
    observing.observe_batches(
        calibration, Network(plan.graph), [Batch(args, dict(kwargs), None, None)]
    )
    return Deployment(plan.graph, observing.observed_solution(calibration), args, dict(kwargs))


def deployed(name: str, fields: Fields, *, exclude: tuple[str, ...] = ()) -> Deployment:
    """A toy calibrated with a config that every layer with weights gets."""
    return calibrated(traced(name), hierarchy(fields, exclude=exclude), *built(name).call(3))


def exported(target: str, given: Deployment, folder: Path) -> float:
    return export(target, given, folder / f"net{EXPORTERS[target].suffix}").max_difference


class Side(nn.Module):
    """Convolutions and linear layers side by side, one of each for a kind of quantization: one
    file holds all.
    """

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(kinds))
        self.linears = nn.ModuleList(nn.Linear(4, 5) for _ in range(kinds))

    def forward(self, x: Tensor) -> list[Tensor]:
        rows = x.flatten(2).transpose(1, 2)
        return [*(conv(x) for conv in self.convs), *(linear(rows) for linear in self.linears)]


def side_by_side(*kinds: Fields) -> Deployment:
    """A convolution and a linear layer of each kind, calibrated."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6, 6)
    names = {
        f"{kind}.{index}": each
        for index, each in enumerate(kinds)
        for kind in ("convs", "linears")
    }
    given = calibrated(
        trace(Side(len(kinds)).eval(), (x,)), hierarchy({}, names=names), (x,), {}
    )
    assert len({tensor.spec for tensor in given.solution.tensors.values()}) >= len(kinds)
    return given


WITH_CODES = ("onnx", "openvino", "pt2", "safetensors")
NOT_IN = {"openvino": ["groups of rows"]}
"""Kinds that a target refuses; encodings have only integers, in their own test."""


OF_EVERY_KIND = [target for target in FILES if target != "encodings"]


# A .float.pt2 has the weights of test mode's own layers
@pytest.mark.parametrize("target", extended_except(OF_EVERY_KIND, *WITH_CODES))
def test_weights_of_every_kind_are_equal_in_every_file(target: str, tmp_path: Path) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(package, reason=f"--to {target} needs it")
    refused = NOT_IN.get(target, [])
    given = side_by_side(
        *({"weights": kind} for name, kind in WEIGHTS.items() if name not in refused)
    )
    assert exported(target, given, tmp_path) < 2e-6  # runtimes add up in orders of their own
    for name in refused:
        with pytest.raises(UsageError, match="which OpenVINO does not run"):
            exported(target, side_by_side({"weights": WEIGHTS[name]}), tmp_path)


@pytest.mark.parametrize("target", ["pt2", "safetensors"])
def test_programs_and_tensor_files_hold_every_kind_of_input(
    target: str, tmp_path: Path
) -> None:
    """Inputs of a .float.pt2 are test mode's own modules, as those of a .pt2 without operators
    of integers are.
    """
    given = side_by_side(*({"weights": {}, "input": kind} for kind in INPUTS.values()))
    assert exported(target, given, tmp_path) < 2e-6  # as above


@pytest.mark.parametrize("target", ["pt2_float", "safetensors"])
def test_dynamic_inputs_inside_a_network(target: str, tmp_path: Path) -> None:
    assert (
        exported(
            target, deployed("attention", {"weights": {}, "input": INPUTS["tokens"]}), tmp_path
        )
        == 0.0
    )


@pytest.mark.parametrize("kind", ["tokens", "mx"])
def test_a_program_takes_any_number_of_rows(kind: str, tmp_path: Path) -> None:
    """Of a batch that is open, and several rows in each of its samples."""
    config, x = hierarchy({"weights": {}, "input": INPUTS[kind]}), torch.randn(4, 9, 64)
    given = calibrated(trace(nn.Sequential(nn.Linear(64, 8)).eval(), (x,)), config, (x,), {})
    assert exported("pt2", given, tmp_path) == 0.0
    rows = torch.randn(7, 9, 64)
    expected = outputs_of(replace(given, args=(rows,)))[0]
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(rows), expected)


def test_onnx_has_eight_bit_floats(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    given = side_by_side(
        *(
            {"weights": {"dtype": kind}, "input": {"dtype": kind}}
            for kind in ("fp8_e4m3", "fp8_e5m2")
        )
    )
    assert exported("onnx", given, tmp_path) < 2e-6


def test_groups_are_stored_as_codes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the ONNX target needs it (extra: onnx)")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
    exported("onnx", deployed("residual", {"weights": GROUPS}, exclude=("conv1",)), tmp_path)
    model = onnx.load(tmp_path / "net.onnx")
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(nodes) == 5
    assert {attribute.name: attribute.i for attribute in nodes[0].attribute} == {
        "axis": 1,
        "block_size": 2,
    }
    assert {
        t.data_type for t in model.graph.initializer if t.name.endswith("weights.codes")
    } == {onnx.TensorProto.INT4}


@pytest.mark.parametrize("kind", ["dynamic", "tokens"])
def test_onnx_finds_ranges_at_run_time(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    for number, each in enumerate(
        (
            side_by_side({"weights": {}, "input": INPUTS[kind]}),
            deployed("residual", {"weights": {}, "input": INPUTS[kind]}),
        )
    ):
        assert exported("onnx", each, tmp_path / str(number)) < 2e-6


@pytest.mark.parametrize("kind", ["mx", "fp4", "channels"])
def test_onnx_refuses_what_it_cannot_say_with_the_first_layers(kind: str) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    given = deployed("residual", {"weights": {}, "input": INPUTS[kind]})
    with pytest.raises(UsageError) as refused:
        require_expressible(CHECKED_TARGETS["onnx"], given.graph, given.solution.specs, -1)
    inputs = [f"{role} of {layer}" for layer, role in given.solution.tensors if role == "input"]
    assert refused.value.message.startswith(
        f"--to onnx: {', '.join(inputs[:5])} and {len(inputs) - 5} more: each "
    )


def test_ranges_that_are_dynamic_leave_no_scale_in_files(tmp_path: Path) -> None:
    exported(
        "safetensors",
        deployed("residual", {"weights": {}, "input": INPUTS["dynamic"]}),
        tmp_path,
    )
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert not [name for name in file.keys() if ".input" in name]  # noqa: SIM118 - not a dict
