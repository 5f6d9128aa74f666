"""Presets leave layers in float whose rounded weights the file to write cannot hold, or is no
smaller with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.llamas import llama
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.resources import load_resource
from quantizer.export.refusals import layers_to_leave, planned_refusals
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS
from quantizer.graph.ir import Graph
from quantizer.graph.modules import module_graph
from quantizer.graph.tracing.trace import trace
from quantizer.plan.fit.fitted_config import fitted_document
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

PRESET = load_resource("configs", "weight_int8.json")


def plan_of(document: dict[str, Any], graph: Graph) -> Plan:
    return resolve_plan(check_document(Document.of(document, "config")).require(), graph, graph)


def test_a_computed_weight_stays_float_if_the_file_has_no_place_for_it() -> None:
    layers = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    graph = trace(layers.eval(), (torch.zeros(2, 8),))
    to_leave = layers_to_leave("compressed-tensors", {})
    result = fitted_document(PRESET, graph, to_leave=to_leave)
    assert result.changes == (
        "0 left in float: the model computes the weight, and has no place for a rounded one",
    )
    plan = plan_of(result.document, graph)
    assert list(plan.tensors) == [("Sequential::Sequential/Linear[1]/linear", "weights")]
    assert not to_leave(plan)
    assert fitted_document(PRESET, graph).changes == (), "other files may hold it"


@pytest.mark.parametrize("target", ["compressed-tensors", "gptq", "gguf", "safetensors"])
def test_an_embedding_stays_float_if_the_file_has_no_codes_of_it(target: str) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(package, reason="needs quantizer-torch[llm]")
    graph = module_graph(llama())
    to_leave = layers_to_leave(target, {})
    result = fitted_document(PRESET, graph, to_leave=to_leave)
    if target in ("gguf", "safetensors"):
        assert result.changes == ()
        return
    assert result.changes == (
        f"kind:embedding left in float: {target} stores the weight as floats, so rounding saves "
        "nothing",
    )
    assert result.document["exclude"] == [*PRESET["exclude"], "kind:embedding"]
    assert not to_leave(plan_of(result.document, graph))


def test_a_convolution_stays_float_with_its_input_if_the_file_has_no_codes_of_it() -> None:
    transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=8)
    graph = module_graph(transformers.ViTForImageClassification(config).eval())
    checked = CHECKED_TARGETS["compressed-tensors"]
    preset = load_resource("configs", "dynamic_int8.json")
    to_leave = layers_to_leave("compressed-tensors", {})
    [refusal] = planned_refusals(checked, plan_of(preset, graph))
    assert refusal.role == "input" and "conv2d" in refusal.layer
    fitted = fitted_document(preset, graph, to_leave=to_leave).document
    assert not planned_refusals(checked, plan_of(fitted, graph))
