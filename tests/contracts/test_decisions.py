"""What a calibration decides on its first batches: kept, checked and merged by its declaration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import quantizer
from quantizer.calibration.request import STAGES, Decision
from quantizer.calibration.steps import STEPS
from quantizer.config.resources import load_resource
from quantizer.errors import ResultError
from quantizer.graph.tracing.trace import trace
from quantizer.plugins import loaded, plugin_steps
from quantizer.results.write import write_info

DECISIONS = [
    row for row in (loaded(step.run) for step in plugin_steps()) if isinstance(row, Decision)
]
BY_NAME = pytest.mark.parametrize(
    "decision", DECISIONS, ids=[decision.name for decision in DECISIONS]
)
ROW = {"into": "Linear::nothing", "absorbed": False}
ELSEWHERE: dict[str, Any] = {
    "absorption": {"batches": 1, "layers": {"Linear::nothing": ROW}},
    "levels": {"Linear::nothing": [0]},
}
"""A decision about a layer that no network has."""


def test_each_name_stands_once() -> None:
    names = [step.keeps for step in plugin_steps() if step.keeps]
    assert len(set(names)) == len(names)
    assert {decision.name for decision in DECISIONS} <= set(names)


@BY_NAME
def test_the_schema_of_results_has_what_is_kept(decision: Decision) -> None:
    header = load_resource("schemas", "quant_info.schema.json")["properties"]["header"]
    assert decision.name in header["properties"]
    assert decision.name not in header["required"]


@BY_NAME
def test_what_does_not_fit_the_network_is_refused(decision: Decision) -> None:
    graph = trace(torch.nn.Linear(3, 2), (torch.zeros(2, 3),))
    decision.check({}, graph, "quant_info.json")
    with pytest.raises(ResultError, match=f"header/{decision.name}/.*Linear::nothing"):
        decision.check(ELSEWHERE[decision.name], graph, "quant_info.json")


@BY_NAME
def test_equal_decisions_can_be_merged(decision: Decision) -> None:
    kept = ELSEWHERE[decision.name]
    assert not list(decision.differences(kept, kept))
    assert list(decision.differences(kept, {}))


def test_steps_run_stage_by_stage() -> None:
    stages = [STAGES.index(step.stage) for step in STEPS]
    assert stages == sorted(stages)
    assert set(stages) == set(range(len(STAGES)))


@BY_NAME
def test_a_damaged_decision_is_refused(decision: Decision, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).eval()
    config = {"global_quant_config": {"weight": {"dtype": "int8"}}}
    quantizer.calibrate(model, config, [torch.zeros(2, 3)]).save(tmp_path)
    content = json.loads((tmp_path / "quant_info.json").read_text())
    write_info(tmp_path, {**content["header"], decision.name: 5}, content["tensors"])
    with pytest.raises(ResultError, match=f"header/{decision.name}"):
        quantizer.load(tmp_path, model)
