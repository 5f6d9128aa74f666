"""A preset that is fitted to a model is one that calibration accepts, or it is refused with a
sentence.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from support.extended import extended, extended_except
from support.fitting_models import EXAMPLES, NEED_TRANSFORMERS, Vision, example, example_graph
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer import calibrate
from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document, Text
from quantizer.config.document.edited import edited_text
from quantizer.config.document.read import parse_document
from quantizer.config.load import check_document, load_text
from quantizer.config.resources import load_resource, presets, resource
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.plan.fit.fitted_config import FittedConfig, fitted_document
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
REFUSED = {
    "convolutions": {"gguf_q4_0", "mxfp4", "nvfp4"},
    "depthwise": {"gguf_q4_0", "mxfp4", "nvfp4"},
    "tagger": {"mxfp4", "nvfp4"},
    "recurrent": {"gguf_q5_0", "mxfp4", "nvfp4"},
    "lookup": {"awq_int4_group", "gptq_int4_group", "nvfp4", "w4a4_rotation"},
    "odd_widths": {"gguf_q4_0", "mxfp4", "nvfp4"},
    "products": {"gguf_q4_0", "mxfp4", "nvfp4"},
    "stubs": {"gguf_q4_0", "mxfp4", "nvfp4"},
    "weightless": {"weight_int8", "dynamic_int8", "static_fp8", "gguf_q4_0", "gptq_int4_group"},
}
"""Some of the presets that quantize nothing of a model."""


ALIKE = {
    "gguf_q4_1",
    "gguf_q5_0",
    "gguf_q5_1",
    "gguf_q8_0",
    "gguf_iq4_nl",
    "gguf_q5_k",
    "gguf_q5_k_m",
}
"""What differs from gguf_q4_0 or gguf_q4_k in the width of codes alone."""
WITH_ALL_PRESETS = ("odd_widths", "recurrent", "transposed")
"""Models whose plans are made for these presets as well."""
FOR_IMAGES = {"example", "gpu", "mobile_int8", "npu_int8", "onnx_int8", "tensorrt_int8"}
"""Presets for images beside cpu_int8, dpu and default, which are left out for language models."""


def graph_of(name: str) -> Graph:
    if name in NEED_TRANSFORMERS and not HAS_TRANSFORMERS:
        pytest.skip("needs quantizer-torch[llm]")
    return example_graph(name)


def document_of(preset: str) -> dict[str, Any]:
    return copy.deepcopy(load_resource("configs", f"{preset}.json"))


def fitted(preset: str, model: str) -> FittedConfig:
    return fitted_document(document_of(preset), graph_of(model), name=preset)


def planned(document: dict[str, Any], original: Graph) -> Plan:
    """Return the plan, as `quantizer plan` makes it."""
    config = check_document(Document.of(document, "config")).require()
    return resolve_plan(config, run_passes(original, config.settings), original)


def weights_of(document: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the specs of quantized weights by the last module in a layer's name."""
    specs = {}
    for (layer, role), tensor in planned(document, graph_of(model)).tensors.items():
        if role.startswith("weights"):
            specs[layer.rpartition("[")[2].partition("]")[0]] = tensor.spec
    return specs


USUAL = ("detector", "transposed", "odd_widths", "lookup", "weightless", "gpt2", "experts")


@pytest.mark.slow
@pytest.mark.parametrize("model", extended_except(EXAMPLES, *USUAL))
def test_every_preset_fits_or_is_refused_with_a_sentence(model: str) -> None:
    original = graph_of(model)
    refused = set()
    for preset in presets():
        if model not in WITH_ALL_PRESETS and preset in ALIKE:
            continue
        if model in NEED_TRANSFORMERS and preset in FOR_IMAGES:
            continue
        document = parse_document(
            Text(preset, resource("configs", f"{preset}.json").read_text())
        )
        before = copy.deepcopy(document.value)
        try:
            result = fitted_document(document.value, original, name=preset)
        except UsageError as error:
            assert not isinstance(error, ConfigError)
            assert preset in error.message
            assert original.model in error.message
            assert error.help
            refused.add(preset)
            continue
        assert document.value == before
        text = edited_text(document, result.document)
        loaded = load_text(Text(preset, text))
        assert loaded.require().document == result.document
        assert [found for found in loaded.diagnostics if found.severity != "note"] == []
        plan = planned(loaded.require().document, original)
        warned = [found for found in plan.diagnostics if found.severity != "note"]
        # The DPU runs no linear layer on three dimensions
        assert [found.message for found in warned if found.code != "QZ357"] == []
        assert plan.tensors
        assert (result.document == before) == (result.changes == ())
    assert refused >= REFUSED.get(model, set())
    assert refused == set() or model in REFUSED


@pytest.mark.parametrize("model", ["vision", "tagger", "detector", "transposed"])
def test_what_fits_is_not_changed_again(model: str) -> None:
    for preset in ("default", "awq_int4_group", "mxfp4", "w4a4_rotation", "weight_int4_group"):
        if preset not in REFUSED.get(model, ()):
            document = fitted(preset, model).document
            assert fitted_document(document, graph_of(model), name=preset).changes == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preset"),
    [
        ("vision", "mxfp4"),
        ("detector", "default"),
        ("tagger", "w4a4_rotation"),
        ("transposed", "smoothquant_int8"),
        ("odd_widths", "weight_int4_group"),
        ("weightless", "dpu"),
        ("depthwise", "gptq_int4_group"),
        ("expert_modules", "w4a4_rotation"),
        *extended(
            ("vision", "cpu_int8"),
            ("vision", "gptq_int4_group"),
            ("detector", "awq_int4_group"),
            ("recurrent", "gptq_int4_group"),
            ("lookup", "smoothquant_int8"),
        ),
    ],
)
def test_calibration_accepts_what_fits(model: str, preset: str) -> None:
    made = example(model)
    call = made.args[0] if len(made.args) == 1 else made.args
    result = calibrate(made.module, fitted(preset, model).document, [call])
    outputs, _ = pytree.tree_flatten(result.network(*made.args))
    assert outputs
    assert all(bool(output.isfinite().all()) for output in outputs)


class Wide(nn.Module):
    """Two blocks with 576 inputs, as a small language model has them, and one layer of 1536."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 576)
        self.blocks = nn.ModuleList(nn.Linear(576, 576) for _ in range(2))
        self.up, self.down = nn.Linear(576, 1536), nn.Linear(1536, 576)
        self.head = nn.Linear(576, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.down(torch.relu(self.up(x))))


def test_the_largest_size_that_divides_nearly_all_inputs_is_chosen() -> None:
    original = trace(Wide().eval(), (torch.zeros(2, 3, dtype=torch.long),))
    document = document_of("gptq_int4_group")
    result = fitted_document(document, original, name="gptq_int4_group")
    assert result.document["global_quant_config"]["weight"]["group_size"] == 64
    assert result.changes == (
        "group_size 64 instead of 128: the inputs of blocks.*, up number 576",
    )
    assert "a scale for each 64 inputs" in result.document["//"]
    same = {
        key: value
        for key, value in document.items()
        if key not in ("//", "global_quant_config")
    }
    assert same.items() <= result.document.items()


def test_layers_that_no_size_divides_have_a_scale_for_each_channel() -> None:
    result = fitted("awq_int4_group", "vision")
    specs = weights_of(result.document, "vision")
    assert {specs[name].group_size for name in ("query", "up", "down")} == {32}
    assert (specs["patches"].qscheme, specs["patches"].ch_axis) == ("per_channel", 0)
    assert specs["patches"].bit_width == 4
    assert list(result.document["layer_quant_config"]) == ["patches"]


def test_where_no_layer_fits_the_level_itself_is_per_channel() -> None:
    result = fitted("weight_int4_group", "odd_widths")
    weight = result.document["global_quant_config"]["weight"]
    assert (weight["qscheme"], weight["ch_axis"], weight["dtype"]) == ("per_channel", 0, "int4")
    assert "group_size" not in weight
    assert "layer_quant_config" not in result.document


@pytest.mark.parametrize("preset", ["mxfp4", "nvfp4", "gguf_q4_0"])
def test_blocks_of_a_fixed_size_leave_out_what_they_do_not_divide(preset: str) -> None:
    result = fitted(preset, "vision")
    assert "patches" in result.document["exclude"]
    assert "patches" not in weights_of(result.document, "vision")
    assert "query" in weights_of(result.document, "vision")


def test_few_bits_spare_embeddings_routers_and_heads() -> None:
    result = fitted("weight_int4_group", "experts")
    assert result.document["exclude"] == ["kind:lm_head", "kind:vision", "kind:embedding"], (
        "and routers need no entry"
    )
    specs = weights_of(result.document, "experts")
    assert specs.keys().isdisjoint({"embed_tokens", "gate", "lm_head"})
    assert "q_proj" in specs
    assert fitted("weight_int8", "experts").changes == ()


def test_experts_that_are_modules_have_routers_too() -> None:
    result = fitted("nvfp4", "expert_modules")
    assert result.document["exclude"] == ["kind:embedding", "kind:head", "kind:vision"]
    assert not any("router" in name for name in weights_of(result.document, "expert_modules"))


def test_every_head_of_a_detector_is_spared() -> None:
    result = fitted("weight_int4_group", "detector")
    assert set(result.document["exclude"]) == {
        "kind:lm_head",
        "kind:head",
        "boxes",
        "kind:vision",
    }
    assert weights_of(result.document, "detector").keys() == {"stem", "body"}


def test_heads_with_parts_of_different_ranges_have_a_scale_for_each_channel() -> None:
    specs = weights_of(fitted("default", "detector").document, "detector")
    schemes = {name: spec.qscheme for name, spec in specs.items()}
    assert schemes == {
        "stem": "per_tensor",
        "body": "per_tensor",
        "boxes": "per_channel",
        "scores": "per_channel",
    }
    assert fitted("dpu", "detector").changes == ()


@pytest.mark.parametrize("preset", ["cpu_int8", "gpu", "default"])
@pytest.mark.parametrize("model", ["vision", "gpt2", "llama"])
def test_one_static_scale_behind_a_normalization_asks_for_smoothquant(
    preset: str, model: str
) -> None:
    result = fitted(preset, model)
    assert [entry["name"] for entry in result.document["algorithms"]] == ["smoothquant"]
    [change] = result.changes
    assert "behind a normalization" in change


def test_what_has_no_static_scale_behind_a_normalization_stays_as_it_is() -> None:
    for preset in ("dpu", "bfloat16", "dynamic_int8", "weight_int8", "smoothquant_int8"):
        assert fitted(preset, "vision").changes == ()
    for preset in ("cpu_int8", "static_fp8"):
        assert fitted(preset, "convolutions").changes == ()
    static = fitted("static_fp8", "vision").document
    assert static["pre_quant_opt_config"]["name"] == "smoothquant"


def test_recurrent_layers_have_eight_bits() -> None:
    result = fitted("w4a4_rotation", "tagger")
    entry = result.document["layer_quant_config"]["lstm"]
    assert {role: spec["dtype"] for role, spec in entry.items()} == {
        "input_tensors": "int8",
        "weight": "int8",
    }
    plan = planned(result.document, graph_of("tagger"))
    assert {tensor.spec.bit_width for tensor in plan.tensors.values()} == {8}


def test_transposed_convolutions_have_scales_of_their_own_outputs() -> None:
    specs = weights_of(fitted("weight_int8", "transposed").document, "transposed")
    assert {name: spec.ch_axis for name, spec in specs.items()} == {
        "down": 0,
        "up": 1,
        "out": 1,
    }
    grouped = weights_of(fitted("nvfp4", "transposed").document, "transposed")
    assert {name: spec.ch_axis for name, spec in grouped.items()} == {"up": 0}


def test_blocks_of_inputs_run_along_the_channels_of_convolutions() -> None:
    result = fitted("mxfp4", "detector")
    plan = planned(result.document, graph_of("detector"))
    inputs = [tensor for tensor in plan.tensors.values() if tensor.role == "input"]
    assert {tensor.spec.ch_axis for tensor in inputs} == {1}
    assert inputs


def test_entries_that_only_spared_layers_would_have_are_not_added() -> None:
    result = fitted("mxfp4", "vision")
    assert "layer_type_quant_config" not in result.document
    assert not any("Conv2d" in change for change in result.changes)


def test_algorithms_that_find_nothing_are_left_out() -> None:
    for preset in ("gptq_int4_group", "awq_int4_group", "w4a4_rotation"):
        result = fitted(preset, "tagger")
        assert result.document.keys().isdisjoint({"algo_config", "pre_quant_opt_config"})
        assert any(
            "the model has no linear or convolution layer" in change
            for change in result.changes
        )


def test_gptq_is_left_out_where_a_layer_is_called_twice() -> None:
    """Each call would round the weight to codes of its own."""
    layer = nn.Linear(128, 128)
    graph = trace(nn.Sequential(layer, nn.ReLU(), layer), (torch.zeros(2, 128),))
    result = fitted_document(document_of("gptq_int4_group"), graph, name="config")
    assert "algo_config" not in result.document
    [change] = result.changes
    assert change.startswith("gptq left out of algo_config: it would round the weights of 0")


def test_algorithms_that_name_parts_which_the_model_lacks_are_left_out() -> None:
    document = document_of("smoothquant_int8")
    document["algo_config"] = [{"name": "awq", "model_decoder_layers": "model.layers"}]
    result = fitted_document(document, graph_of("vision"), name="config")
    assert "algo_config" not in result.document
    assert result.document["pre_quant_opt_config"] == document["pre_quant_opt_config"]
    [change] = result.changes
    assert change.startswith("awq left out of algo_config: there is no module 'model.layers'")


def test_entries_for_layers_that_the_model_lacks_are_left_out() -> None:
    result = fitted("example", "convolutions")
    assert [entry["layer_type"] for entry in result.document["layer_quantize_config"]] == [
        "torch.nn.Conv2d"
    ]
    [change] = result.changes
    assert change.startswith(
        "layer_quantize_config[1] left out: the model has no layer ResNet::"
    )
    # An entry that may find nothing stays
    mixed = fitted("mixed_precision", "lookup").document["layer_quantize_config"]
    assert [entry["layer_type"] for entry in mixed] == ["torch.nn.Linear"]
    document = document_of("gguf_q4_0")
    document["exclude"] = ["nowhere", "*.nowhere"]
    result = fitted_document(document, graph_of("vision"), name="config")
    assert result.changes[:2] == (
        "exclude[1] left out: the model has no layer *.nowhere",
        "exclude[0] left out: the model has no layer nowhere",
    )
    assert result.document["exclude"] == ["patches"]


def test_a_single_layer_is_quantized_though_it_is_the_head() -> None:
    result = fitted("nvfp4", "one_layer")
    assert result.document["exclude"] == ["kind:embedding", "kind:vision"]
    assert len(weights_of(result.document, "one_layer")) == 1


def test_entries_of_the_user_stay() -> None:
    document = document_of("weight_int4_group")
    document["layer_quant_config"] = {"head": {"weight": {"dtype": "int8"}}, "//": "kept"}
    result = fitted_document(document, graph_of("vision"), name="config")
    entries = result.document["layer_quant_config"]
    assert entries["head"] == {"weight": {"dtype": "int8"}}
    assert entries["//"] == "kept"
    assert result.document["exclude"] == ["kind:lm_head", "kind:vision"]
    assert weights_of(result.document, "vision")["head"].bit_width == 8


def test_a_comment_that_names_a_key_changes_nothing() -> None:
    plain = fitted("gptq_int4_group", "recurrent")
    document = document_of("gptq_int4_group")
    document["// scales"] = "symmetric_scale has its default"
    commented = fitted_document(document, graph_of("recurrent"), name="gptq_int4_group")
    assert commented.document.pop("// scales")
    assert commented == plain


def test_words_of_other_versions_are_understood() -> None:
    document = document_of("weight_int8")
    weight = document["global_quant_config"]["weight"]
    weight["axis"] = weight.pop("ch_axis")
    assert fitted_document(document, graph_of("vision")) == FittedConfig(document, ())
    result = fitted_document(document, graph_of("transposed"))
    specs = weights_of(result.document, "transposed")
    assert {name: spec.ch_axis for name, spec in specs.items()} == {
        "down": 0,
        "up": 1,
        "out": 1,
    }


def test_a_wrong_document_is_refused_with_its_findings() -> None:
    document = document_of("weight_int4_group")
    document["global_quant_config"]["weight"]["dtype"] = "int9"
    with pytest.raises(ConfigError) as raised:
        fitted_document(document, graph_of("vision"), name="mine")
    assert str(raised.value).startswith("mine.global_quant_config.weight.dtype: ")


def test_a_copy_of_a_block_has_patterns_instead_of_a_list() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Vision() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x) + self.blocks[1](x)

    original = trace(Blocks().eval(), (torch.randn(2, 3, 16, 16),))
    result = fitted_document(document_of("nvfp4"), original, name="nvfp4")
    assert "blocks.*.patches" in result.document["exclude"]
