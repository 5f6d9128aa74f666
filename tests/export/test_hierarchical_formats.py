"""Files of groups, scaled floating-point formats and dynamic ranges: equal to test mode, or refused with layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hierarchies import Fields, hierarchy
from safetensors import safe_open
from torch import nn
from toys import built, traced

from quantizer.engine import calibrate
from quantizer.errors import UsageError
from quantizer.export import EXPORTERS, check, export
from quantizer.export.deployment import Deployment
from quantizer.graph.passes import run_passes
from quantizer.graph.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve
from quantizer.sources.batches import Batch

GROUPS: dict[str, Any] = {"bit_width": 4, "qscheme": "per_group", "group_size": 2}
UNSIGNED: dict[str, Any] = {"symmetric": False, "signed": False}
MX: dict[str, Any] = {"qscheme": "per_group", "group_size": 32, "scale_type": "e8m0"}
WEIGHTS: dict[str, Mapping[str, Any]] = {
    "groups": GROUPS,
    "whole groups": GROUPS | {"group_size": -1},
    "asymmetric groups": GROUPS | UNSIGNED,
    "groups of rows": GROUPS | {"ch_axis": 0, "group_size": -1},
    "fp8": {"dtype": "fp8_e4m3", "qscheme": "per_channel"},
    "fp6": {"dtype": "fp6_e2m3"},
    **{name: MX | {"dtype": name} for name in ("fp8_e5m2", "fp6_e3m2", "fp4", "mx_int8", "bfp16")},
}
INPUTS: dict[str, Mapping[str, Any]] = {
    "dynamic": {"is_dynamic": True},
    "tokens": {"is_dynamic": True, "qscheme": "per_token", **UNSIGNED},
    "mx": MX | {"dtype": "fp4", "is_dynamic": True},
    "fp4": {"dtype": "fp4"},
    "channels": {"qscheme": "per_channel", "ch_axis": -1},
}


def deployed(name: str, fields: Fields, *, exclude: tuple[str, ...] = ()) -> Deployment:
    """A toy calibrated with a config that every layer with weights gets."""
    config = hierarchy(fields, exclude=exclude)
    plan = resolve(config, run_passes(traced(name), config.settings), traced(name))
    assert not any(found.severity == "error" for found in plan.diagnostics)
    args, kwargs = built(name).call(3)
    calibration = calibrate.start(plan)
    calibrate.run(calibration, Network(plan.graph), [Batch(args, kwargs, None, None)])
    return Deployment(plan.graph, calibrate.solution(calibration), args, kwargs)


def exported(target: str, given: Deployment, folder: Path) -> float:
    return export(target, given, folder / f"net{EXPORTERS[target].suffix}").max_difference


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("target", EXPORTERS)
def test_weights_of_every_kind_are_equal_in_every_file(target: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    given = deployed("residual", {"weights": WEIGHTS[kind]}, exclude=("conv1",))
    assert exported(target, given, tmp_path) < 2e-6  # runtimes add up in orders of their own


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_programs_and_tensor_files_hold_every_kind_of_input(name: str, kind: str, tmp_path: Path) -> None:
    given = deployed(name, {"weights": {}, "input": INPUTS[kind]})
    assert exported("pt2", given, tmp_path) == 0.0
    assert exported("safetensors", given, tmp_path) == 0.0


@pytest.mark.parametrize("kind", ["tokens", "mx"])
def test_a_program_takes_any_number_of_rows(kind: str, tmp_path: Path) -> None:
    """Of a batch that is open, and several rows in each of its samples."""
    config, x = hierarchy({"weights": {}, "input": INPUTS[kind]}), torch.randn(4, 9, 64)
    graph = trace(nn.Sequential(nn.Linear(64, 8)).eval(), (x,))
    calibration = calibrate.start(resolve(config, graph, graph))
    given = Deployment(graph, calibrate.solution(calibration), (x,), {})
    assert exported("pt2", given, tmp_path) == 0.0
    rows = torch.randn(7, 9, 64)
    expected = replace(given, args=(rows,)).expected[0]
    assert torch.equal(torch.export.load(tmp_path / "net.pt2").module()(rows), expected)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_onnx_has_eight_bit_floats(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    given = deployed("residual", {"weights": {"dtype": dtype}, "input": {"dtype": dtype}})
    assert exported("onnx", given, tmp_path) < 2e-6


def test_groups_are_stored_as_codes(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the ONNX target needs it (extra: onnx)")
    pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")
    exported("onnx", deployed("residual", {"weights": GROUPS}, exclude=("conv1",)), tmp_path)
    model = onnx.load(tmp_path / "net.onnx")
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(nodes) == 5
    assert {attribute.name: attribute.i for attribute in nodes[0].attribute} == {"axis": 1, "block_size": 2}
    assert {t.data_type for t in model.graph.initializer if t.name.endswith("weights.codes")} == {onnx.TensorProto.INT4}


@pytest.mark.parametrize("kind", INPUTS)
def test_onnx_refuses_what_it_cannot_say_with_the_first_layers(kind: str) -> None:
    pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
    given = deployed("residual", {"weights": {}, "input": INPUTS[kind]})
    with pytest.raises(UsageError) as refused:
        check("onnx", given.graph, given.solution, -1)
    inputs = [f"{role} of {layer}" for layer, role in given.solution.tensors if role == "input"]
    assert refused.value.message.startswith(f"--deploy onnx: {', '.join(inputs[:5])} and {len(inputs) - 5} more: each ")


def test_ranges_that_are_dynamic_leave_no_scale_in_files(tmp_path: Path) -> None:
    exported("safetensors", deployed("residual", {"weights": {}, "input": INPUTS["dynamic"]}), tmp_path)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert not [name for name in file.keys() if ".input" in name]  # noqa: SIM118 - not a dict
