"""What calibration and test mode will take of memory, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from quantizer import memory
from quantizer.config.document import Document
from quantizer.config.load import check_document
from quantizer.config.model import Config
from quantizer.engine.footprint import Data, calibration_bytes, comparison_bytes, peak_with
from quantizer.graph.trace import trace
from quantizer.numerics.deferred import DeferredTensor
from quantizer.plan.resolve import resolve

WEIGHT, BIAS = 100 * 40, 40
COPIES = 4 * 4 * WEIGHT
VALUES = 4 * 8 * (100 + 40)
"""Of a batch of 8, before and after the layer."""


def configured(**more: object) -> Config:
    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    return check_document(Document.of({"global_quant_config": {"weight": weight}, **more}, "config.json")).require()


def test_a_layer_in_memory_and_out_of_it() -> None:
    graph = trace(nn.Sequential(nn.Linear(100, 40)), (torch.zeros(2, 100),))
    config = configured()
    plan, data = resolve(config, graph, graph), Data(8, 3)
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    assert calibration_bytes(plan, config, data) == COPIES + WEIGHT + BIAS
    assert comparison_bytes(graph, specs, 8) == COPIES + 5 * VALUES + 5 * (WEIGHT + BIAS)
    deferred = {path: DeferredTensor(t.shape, t.dtype, lambda t=t: t) for path, t in graph.tensors.items()}
    outside = graph.replaced(tensors=deferred)
    assert calibration_bytes(replace(plan, graph=outside), config, data) == COPIES
    assert comparison_bytes(outside, specs, 8) == COPIES + 5 * VALUES


def test_an_algorithm_adds_matrices_and_values_of_all_batches_within_the_budget() -> None:
    graph = trace(nn.Sequential(nn.Linear(100, 40)), (torch.zeros(2, 100),))
    config = configured(algo_config={"name": "gptq"})
    plan = resolve(config, graph, graph)
    least = 2 * COPIES + 5 * 4 * 100 * 100 + 2 * VALUES + 5 * (WEIGHT + BIAS)
    assert calibration_bytes(plan, config, Data(8, 3, 0)) == least
    assert calibration_bytes(plan, config, Data(8, 3, 1 << 20)) == least + 3 * 4 * 8 * 100
    assert calibration_bytes(plan, config, Data(8, 3, 99)) == least + 99


def test_the_peak_is_that_of_now_at_least() -> None:
    most, now = memory.peak(), memory.resident()
    assert most is not None
    assert now is not None
    assert (peak_with(0) or 0) >= most * 0.99
    assert (peak_with(1 << 40) or 0) > 1 << 40
