"""What calibration and test mode will take of memory, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from quantizer.calibration.memory_prediction import (
    IN_COLUMNS,
    BatchSizes,
    calibration_bytes,
    comparison_bytes,
    peak_with,
)
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.model import ResolvedConfig
from quantizer.graph.tracing.trace import trace
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import HOLES, working_bytes
from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import DeferredTensor

WEIGHT, BIAS = 100 * 40, 40
COPIES = 4 * 4 * WEIGHT


def configured(**more: object) -> ResolvedConfig:
    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    return check_document(
        Document.of({"global_quant_config": {"weight": weight}, **more}, "config.json")
    ).require()


def test_a_layer_in_memory_and_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(nn.Sequential(nn.Linear(100, 40)), (torch.zeros(2, 100),))
    config = configured()
    plan, data = resolve_plan(config, graph, graph), BatchSizes(8, 3)
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    codes = WEIGHT + BIAS
    assert calibration_bytes(plan, config, data) == COPIES + codes
    assert comparison_bytes(graph, specs, 8) == COPIES + 5 * codes
    assert (
        comparison_bytes(graph, specs, 1000) == HOLES * 1000 * 4 * (2 * 40 + 3 * 40) + 5 * codes
    )
    deferred = {
        path: DeferredTensor(t.shape, t.dtype, lambda t=t: t)
        for path, t in graph.tensors.items()
    }
    outside = graph.replaced(tensors=deferred)
    values = 1000 * 4 * (2 * 40 + 3 * 40)
    for keeps_freed_blocks, ratio in ((False, 1), (True, HOLES)):
        monkeypatch.setattr(process_memory, "_keeps_freed_blocks", keeps_freed_blocks)
        in_calibration = calibration_bytes(replace(plan, graph=outside), config, data)
        assert in_calibration == int(ratio * COPIES)
        assert comparison_bytes(outside, specs, 1000) == int(ratio * values)


def test_an_algorithm_adds_matrices_and_values_of_all_batches_within_the_budget() -> None:
    graph = trace(nn.Sequential(nn.Linear(100, 40)), (torch.zeros(2, 100),))
    config = configured(algo_config={"name": "gptq"})
    plan = resolve_plan(config, graph, graph)
    least = 4 * (2 * 100 * 100 + IN_COLUMNS * WEIGHT) + 5 * (WEIGHT + BIAS)
    assert calibration_bytes(plan, config, BatchSizes(8, 3, 0)) == least
    assert calibration_bytes(plan, config, BatchSizes(8, 3, 1 << 20)) == least + 3 * 4 * 8 * 100
    assert calibration_bytes(plan, config, BatchSizes(8, 3, 99)) == least + 99


def test_guidance_keeps_what_the_operators_of_one_batch_read() -> None:
    network = nn.Sequential(nn.Linear(100, 40), *(nn.Sigmoid() for _ in range(8)))
    graph = trace(network, (torch.zeros(2, 100),))
    config = configured(algo_config={"name": "gptq", "guidance": 0.5})
    plan, size = resolve_plan(config, graph, graph), 5000
    read, gradients = 8 * 40, 2 * 40
    expected = 4 * size * (read + gradients) + 5 * (WEIGHT + BIAS)
    assert calibration_bytes(plan, config, BatchSizes(size, 3, 0)) == expected


def test_layer_by_layer_what_a_layer_reads_and_makes_is_kept_of_all_batches() -> None:
    graph = trace(
        nn.Sequential(nn.Linear(100, 40), nn.ReLU(), nn.Linear(40, 7)), (torch.zeros(2, 100),)
    )
    config = configured()
    plan = resolve_plan(config, graph, graph)
    reads_and_makes, before = 4 * 8 * 5000 * (100 + 40), 4 * 8 * 5000 * 100
    found = calibration_bytes(plan, config, BatchSizes(8, 5000, 1 << 40), finetuned=True)
    assert found == reads_and_makes + before + 5 * (WEIGHT + BIAS + 40 * 7 + 7)


def test_convolutions_have_a_copy_in_another_layout() -> None:
    graph = trace(nn.Conv2d(2, 3, 1), (torch.zeros(2, 2, 50, 50),))
    assert [working_bytes(graph, node, 8) for node in graph.nodes] == [0, 8 * 3 * 50 * 50 * 4]


def test_the_peak_is_that_of_now_at_least() -> None:
    most, now = process_memory.peak_bytes(), process_memory.resident_bytes()
    assert most is not None
    assert now is not None
    assert (peak_with(0) or 0) >= most * 0.99
    assert (peak_with(1 << 40) or 0) > 1 << 40
