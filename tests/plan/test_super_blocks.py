"""Formats with super-blocks of 256 inputs where 256 does not divide the inputs of a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantizer.config.algorithms import ALGORITHMS, finds_codes
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.resources import load_resource
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.plan.fit.fitted_config import fitted_document
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.plan.size import parameter_bytes

INSTEAD = {"q4_k": ("int5", True), "q5_k": ("uint5", False), "q6_k": ("int8", True)}


def network() -> Graph:
    """Layers with 256, 96 and 40 inputs, and a head."""
    layers = nn.Sequential(
        nn.Linear(256, 96), nn.Linear(96, 40), nn.Linear(40, 256), nn.Linear(256, 8)
    )
    return trace(layers.eval(), (torch.zeros(2, 256),))


def planned(document: dict[str, Any], graph: Graph) -> Plan:
    config = check_document(Document.of(document, "config")).require()
    return resolve_plan(config, run_passes(graph, config.settings), graph)


def document_of(dtype: str) -> dict[str, Any]:
    return {"global_quant_config": {"weight": {"dtype": dtype, "ch_axis": 1}}}


@pytest.mark.parametrize("dtype", INSTEAD)
def test_a_plan_names_the_layers_and_what_llama_cpp_does(dtype: str) -> None:
    findings = planned(document_of(dtype), network()).diagnostics
    [error] = [finding for finding in findings if finding.severity == "error"]
    assert error.code == "QZ407"
    assert (
        f"{dtype} has super-blocks of 256, which do not divide the axis of 2" in error.message
    )
    assert "96 long in weights of Sequential::Sequential/Linear[1]/linear" in error.message
    assert f"use {INSTEAD[dtype][0]} in groups of 32" in str(error.help)


@pytest.mark.parametrize("dtype", INSTEAD)
def test_a_fitted_config_has_the_types_of_llama_cpp(dtype: str) -> None:
    graph = network()
    fitted = fitted_document(document_of(dtype), graph)
    plan = planned(dict(fitted.document), graph)
    assert not [finding for finding in plan.diagnostics if finding.severity == "error"]
    specs = {}
    for (layer, _), tensor in plan.tensors.items():
        specs[layer.partition("[")[2][:1]] = tensor.spec
    word, symmetric = INSTEAD[dtype]
    assert specs["0"].dtype == dtype
    assert (specs["1"].dtype, specs["1"].group_size) == ("int", 32)
    assert specs["1"].bit_width == int(word[-1])
    assert specs["1"].symmetric == symmetric
    assert "2" not in specs, "32 does not divide 40 either"
    assert f"{word} in groups of 32 instead of {dtype}" in " ".join(fitted.changes)


def test_a_preset_is_fitted_to_a_model_and_stays_where_it_fits() -> None:
    graph = network()
    fitted = fitted_document(load_resource("configs", "gguf_q4_k.json"), graph)
    assert "as in llama.cpp" in " ".join(fitted.changes)
    wide = trace(nn.Sequential(nn.Linear(512, 8)).eval(), (torch.zeros(2, 512),))
    assert not [
        change
        for change in fitted_document(load_resource("configs", "gguf_q4_k.json"), wide).changes
        if "instead of" in change
    ]


@pytest.mark.parametrize(
    ("dtype", "size"), [("q4_k", 144), ("q5_k", 176), ("q6_k", 210), ("iq4_nl", 144)]
)
def test_sizes_are_those_of_the_blocks_in_a_file(dtype: str, size: int) -> None:
    """Bytes of 256 values in ggml's blocks."""
    config = check_document(Document.of(document_of(dtype), "config")).require()
    graph = network()
    plan = resolve_plan(config, run_passes(graph, config.settings), graph)
    tensor = next(iter(plan.tensors.values()))
    scales = 256 // int(tensor.spec.group_size or 1)
    assert parameter_bytes(256, tensor.spec, scales) == size


@pytest.mark.parametrize("name", [*ALGORITHMS])
@pytest.mark.parametrize("dtype", ["q4_k", "iq4_nl"])
def test_algorithms_that_cannot_change_super_blocks_are_refused(name: str, dtype: str) -> None:
    graph = trace(nn.Linear(256, 8).eval(), (torch.zeros(2, 256),))
    key = "algo_config" if finds_codes(ALGORITHMS[name]) else "pre_quant_opt_config"
    findings = planned(document_of(dtype) | {key: {"name": name}}, graph).diagnostics
    errors = [finding for finding in findings if finding.severity == "error"]
    if dtype == "iq4_nl" or name == "imatrix" or key == "pre_quant_opt_config":
        assert not errors
        return
    [error] = errors
    assert error.code == "QZ361"
    assert f"which {name} cannot change" in error.message
    assert "write imatrix" in str(error.help)
    fitted = fitted_document(document_of(dtype) | {key: {"name": name}}, graph)
    assert key not in fitted.document
