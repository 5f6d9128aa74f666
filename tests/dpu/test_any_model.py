"""Whatever a model is made of: the DPU's verdict, alignment and exact run say something about
it, and none breaks.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.toys import TOYS, built, traced

from quantizer.algorithms.dpu_alignment.dpu_alignment import align_positions
from quantizer.calibration import observing
from quantizer.config.load import default_config
from quantizer.config.model import Settings
from quantizer.evaluation.exact import compare_exact
from quantizer.graph.passes import run_passes
from quantizer.nn.network import Network
from quantizer.plan.dpu_support import subgraphs, verdicts
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

DPU = Settings(target_device="DPU")


@pytest.mark.parametrize("name", TOYS)
def test_every_layer_has_a_verdict_and_every_code_is_compared(name: str) -> None:
    original = traced(name)
    config = dataclasses.replace(default_config(), settings=DPU)
    plan = resolve_plan(config, run_passes(original, DPU), original)
    found = verdicts(plan)
    assert list(found) == [node.name for node in plan.graph.nodes]
    assert all(
        (verdict.device == "CPU") == bool(verdict.why) == bool(verdict.source)
        for verdict in found.values()
    )
    assert subgraphs(plan.graph, found) <= sum(
        verdict.device == "DPU" for verdict in found.values()
    )
    toy = built(name)
    args, kwargs = toy.call(4) if toy.batched else (toy.args, dict(toy.kwargs))
    batch = Batch(args, kwargs, None, None)
    calibration = observing.create_observers(plan)
    with torch.no_grad():
        observing.observe_batches(calibration, Network(plan.graph), [batch])
    solution, _ = align_positions(observing.observed_solution(calibration), plan.graph, DPU)
    exact = compare_exact(plan.graph, solution, [batch])
    compared = {(row.layer, row.role) for row in exact.layers if row.codes}
    wanted = {
        key
        for key in solution.tensors
        if key[1] == "activation" or plan.graph.by_name[key[0]].op == "input"
    }
    assert compared == wanted
    assert exact.equal == 1.0
