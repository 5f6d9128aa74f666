"""What calibration finds and writes for groups, scaled formats and dynamic ranges, and what it
refuses.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.hierarchies import Fields, hierarchy
from support.toys import built, traced

from quantizer.algorithms.bias_correction.bias_correction import (
    correct_layer_biases,
    output_steps,
)
from quantizer.algorithms.finetuning.network import finetune_network
from quantizer.calibration import fingerprint, observing
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import quantized_network
from quantizer.config.model import ResolvedConfig
from quantizer.errors import DataError, ModelError, ResultError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.sequential_runner import SequentialRunner
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.results.folder import read_info
from quantizer.results.write import write_results
from quantizer.sources.batches import Batch

GROUPS: dict[str, Any] = {"bit_width": 4, "qscheme": "per_group", "group_size": 2}
DYNAMIC: dict[str, Any] = {"is_dynamic": True}
FC = "Residual::Residual/Linear[fc]/linear"
INFO, SCALES = "quant_info.json", "qparams.safetensors"
E4M3 = torch.float8_e4m3fn


def planned(
    fields: Fields, name: str = "residual", graph: Graph | None = None, **more: Any
) -> Plan:
    config = hierarchy(fields, **more)
    graph = graph or run_passes(traced(name), config.settings)
    return resolve_plan(config, graph, traced(name))


def batch(name: str = "residual") -> Batch:
    return Batch(*built(name).call(4), None, None)


def calibrated(plan: Plan, name: str = "residual") -> Calibration:
    calibration = observing.create_observers(plan)
    observing.observe_batches(
        calibration, Network(plan.graph), [batch(name)] if plan.needs_data else []
    )
    return calibration


def write(folder: Path, fields: Fields, **more: Any) -> dict[str, Any]:
    """The content of quant_info.json."""
    calibration = calibrated(planned(fields, **more))
    config = hierarchy(fields, **more)
    digests = fingerprint.model_digests(traced("residual"))
    write_results(
        folder,
        traced("residual"),
        calibration,
        observing.observed_solution(calibration),
        config=config,
        run=digests,
    )
    content: dict[str, Any] = json.loads((folder / INFO).read_text())
    return content


def test_layers_that_read_one_value_alike_share_an_observer() -> None:
    plan = planned({"input": {}}, "attention")
    calibration = calibrated(plan, "attention")
    readers = [key for key, tensor in plan.tensors.items() if "Linear[" in key[0]]
    assert len({plan.tensors[key].source for key in readers}) == 1 < len(readers)
    assert len({id(calibration.observers[key]) for key in readers}) == 1
    kept = {key.rpartition("|")[0] for key in calibration.state_dict()}
    observers = {id(observer) for observer in calibration.observers.values()}
    assert len(kept) == len(observers) + len(calibration.histograms)
    again = observing.create_observers(plan)
    again.load_state_dict(calibration.state_dict())
    before, after = (
        observing.observed_solution(calibration).tensors,
        observing.observed_solution(again).tensors,
    )
    assert {key: float(tensor.scale) for key, tensor in before.items()} == {
        key: float(tensor.scale) for key, tensor in after.items()
    }


class Twice(torch.nn.Module):
    """A layer that is called twice, and another that has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tied = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.fc(9 * torch.tanh(self.fc(x))))  # type: ignore[no-any-return]


def test_a_weight_in_several_layers_has_one_scale_and_each_call_a_range_of_its_own() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    original = trace(Twice().eval(), (x,))
    graph = run_passes(original, hierarchy({}).settings)
    calibration = observing.create_observers(
        resolve_plan(hierarchy({"weights": {}, "input": {}}), graph, original)
    )
    observing.observe_batches(calibration, Network(graph), [Batch((x,), {}, None, None)])
    found = observing.observed_solution(calibration)
    layers = [node.name for node in graph.nodes if node.op == "linear"]
    assert (
        len({graph.by_name[layer].params["weight"] for layer in layers}) == 1 < len(layers) == 3
    )
    assert len({float(found.tensors[layer, "weights"].scale) for layer in layers}) == 1
    assert len({float(found.tensors[layer, "input"].scale) for layer in layers}) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        GROUPS,
        {"dtype": "bfloat16"},
        {"dtype": "fp8_e4m3"},
        {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_type": "e8m0"},
    ],
    ids=lambda spec: spec.get("dtype", "int") + spec.get("qscheme", ""),
)
def test_weights_that_are_not_finite_are_named(spec: dict[str, Any], value: float) -> None:
    graph = run_passes(traced("residual"), hierarchy({}).settings)
    path = graph.by_name[FC].params["weight"]
    broken = graph.tensors[path].clone()
    broken[0, 1] = value
    plan = planned(
        {"weights": spec},
        graph=graph.replaced(tensors={**graph.tensors, path: broken}),
        exclude=("conv1",),
    )
    with pytest.raises(
        ModelError, match=r"weights of Residual::Residual/Linear\[fc\]/linear: [01] NaN"
    ):
        observing.create_observers(plan)


@pytest.mark.parametrize(
    "spec", [{}, DYNAMIC, {"dtype": "float16"}, DYNAMIC | {"qscheme": "per_token"}], ids=str
)
def test_activations_that_are_not_finite_are_named_with_their_batch(
    spec: dict[str, Any],
) -> None:
    plan = planned({"weights": {}, "input": spec})
    good, bad = batch(), batch()
    bad.args[0][0, 0, 0, 0] = math.nan
    with pytest.raises(
        DataError, match=r"batch 1: input of Residual::Residual/Conv2d\[conv1\]/conv2d: 1 NaN"
    ):
        observing.observe_batches(
            observing.create_observers(plan), Network(plan.graph), [good, bad]
        )


def test_a_plan_without_ranges_that_stay_takes_no_batches() -> None:
    plan = planned({"weights": GROUPS, "input": DYNAMIC}, exclude=("conv1",))
    observing.observe_batches(observing.create_observers(plan), Network(plan.graph), [])
    with pytest.raises(DataError, match="no batches"):
        needing = planned({"weights": {}, "input": {}})
        observing.observe_batches(
            observing.create_observers(needing), Network(needing.graph), []
        )


def test_scales_of_groups_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    content = write(
        tmp_path,
        {"weights": GROUPS | {"symmetric": False, "signed": False}},
        exclude=("conv1",),
    )
    entry = content["tensors"][FC]["weights"]
    assert (entry["scales_in"], entry["scale_shape"]) == (SCALES, [5, 2])
    assert not {"scale", "zero_point"} & entry.keys()
    assert isinstance(entry["observed_min"], float) and isinstance(entry["observed_max"], float)
    assert SCALES in content["header"]["files"]
    stored, solution = load_file(tmp_path / SCALES), read_info(tmp_path).solution
    tensor = solution.tensors[FC, "weights"]
    assert torch.equal(stored[f"{entry['module']}.weights.scale"], tensor.scale)
    assert torch.equal(stored[f"{entry['module']}.weights.zero_point"], tensor.zero_point)
    (tmp_path / SCALES).write_bytes(b"")
    with pytest.raises(ResultError, match="was changed after calibration"):
        read_info(tmp_path)


def test_dynamic_tensors_have_no_scale_and_floats_no_zero_point(tmp_path: Path) -> None:
    content = write(tmp_path, {"weights": {"dtype": "fp8_e4m3"}, "input": DYNAMIC})
    tensors = content["tensors"][FC]
    assert not {"scale", "zero_point", "observed_min", "quant_min"} & tensors["input"].keys()
    assert (
        "scale" in tensors["weights"]
        and not {"zero_point", "quant_min"} & tensors["weights"].keys()
    )


def test_origins_are_told_in_the_plan_alone(tmp_path: Path) -> None:
    content = write(tmp_path, {"weights": {}})
    assert "origins" not in content["tensors"][FC]["weights"]
    assert "origins" in (tmp_path / "plan.json").read_text()
    assert not {"plan.json", "config.resolved.json"} & content["header"]["files"].keys()


def test_another_calibration_removes_the_scales_of_groups(tmp_path: Path) -> None:
    write(tmp_path, {"weights": GROUPS}, exclude=("conv1",))
    assert (tmp_path / SCALES).exists()
    write(tmp_path, {"weights": {}})
    assert not (tmp_path / SCALES).exists()


def test_finetuning_leaves_groups_and_floats_as_they_are_and_says_so() -> None:
    plan = planned(
        {"weights": GROUPS, "input": DYNAMIC},
        names={"fc": {"weights": {"qscheme": "per_channel"}}},
        exclude=("conv1",),
    )
    found = observing.observed_solution(calibrated(plan))
    made = finetune_network(
        plan.graph,
        found,
        lambda: [batch()],
        "adaround",
        seed=0,
        done={},
        after_layer=lambda _: None,
    )
    assert set(made.layers) == {FC} and made.plain == 4
    if not made.undone:
        assert "4 with weights in groups or other formats keep round-to-nearest" in made.summary


@pytest.mark.parametrize(
    "weights", [GROUPS, {"dtype": "fp4"}, {"qscheme": "per_channel", "bit_width": 3}], ids=str
)
def test_biases_are_corrected_whatever_the_weights_are(weights: dict[str, Any]) -> None:
    config = hierarchy(
        {"weights": weights, "input": DYNAMIC | {"qscheme": "per_token"}}, exclude=("conv1",)
    )
    settings = dataclasses.replace(config.settings, include_bias_corr=True)
    corrected = ResolvedConfig(settings, config.rules, form="hierarchical")
    plan = resolve_plan(corrected, run_passes(traced("residual"), settings), traced("residual"))
    calibration = calibrated(plan)
    found = observing.observed_solution(calibration)
    network = quantized_network(plan.graph, found)
    runner = SequentialRunner(network, [batch()])
    steps = output_steps(plan, found)
    corrections = correct_layer_biases(runner, calibration.means, steps)
    assert corrections.keys() == set(plan.corrected) and FC in corrections
    with torch.no_grad():
        call = batch()
        want, got = (
            net(*call.args, **call.kwargs).mean(0) for net in (Network(plan.graph), network)
        )
    assert torch.allclose(want, got, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "parts", "size"),
    [
        ({"dtype": "fp4", "group_size": 32, "scale_type": "e8m0"}, {"scale": torch.uint8}, 5),
        (
            {"dtype": "fp4", "group_size": 2, "scale_type": "e4m3"},
            {"scale": E4M3, "global_scale": torch.float32},
            14,
        ),
        (GROUPS | {"scale_type": "e4m3"}, {"scale": E4M3, "global_scale": torch.float32}, 14),
        (
            {"dtype": "mx6", "group_size": 16, "scale_type": "microexponent"},
            {"scale": torch.uint8},
            10,
        ),
        (
            {"dtype": "fp8_e4m3", "group_size": 2, "qscheme": "per_block"},
            {"scale": torch.float32},
            24,
        ),
    ],
    ids=["mxfp4", "nvfp4", "int4", "mx6", "fp8 blocks"],
)
def test_scales_of_few_bits_are_stored_in_these(
    spec: dict[str, Any], parts: dict[str, torch.dtype], size: int, tmp_path: Path
) -> None:
    spec = {"qscheme": "per_group"} | spec
    content = write(tmp_path, {"weights": spec}, exclude=("conv1",))
    name = f"{content['tensors'][FC]['weights']['module']}.weights."
    stored = {
        key[len(name) :]: t
        for key, t in load_file(tmp_path / SCALES).items()
        if key.startswith(name)
    }
    assert {key: tensor.dtype for key, tensor in stored.items()} == parts
    assert sum(tensor.nbytes for tensor in stored.values()) == size
    found = observing.observed_solution(
        calibrated(planned({"weights": spec}, exclude=("conv1",)))
    )
    assert torch.equal(
        read_info(tmp_path).solution.tensors[FC, "weights"].scale,
        found.tensors[FC, "weights"].scale,
    )
