"""`kind:vision`: the layers of a language model that serve images or audio stay in float."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from support.media_models import MEDIA_MODELS, clip, llava, qwen2_vl, whisper

from quantizer import ModelQuantizer, calibrate
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.inplace import InPlace
from quantizer.nn.network import Network
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.module_state import prepare_for_traces

CONFIGS = Path("configs").resolve()
PRESETS = {path.stem: json.loads(path.read_text("utf-8")) for path in CONFIGS.glob("*.json")}
WEIGHT_INT8 = PRESETS["weight_int8"]
LANGUAGE_PRESETS = sorted(name for name, preset in PRESETS.items() if "exclude" in preset)


@cache
def traced(name: str) -> Graph:
    """The trace of one of the models."""
    model, call = MEDIA_MODELS[name]()
    return trace(prepare_for_traces(model), (), call)


def quantized_paths(document: dict[str, Any], original: Graph) -> set[str]:
    """The paths of the layers of a trace whose weights a config quantizes."""
    config = check_document(Document.of(document, "config")).require()
    plan = resolve_plan(config, run_passes(original, config.settings), original)
    paths: set[str] = set()
    for name, role in plan.tensors:
        if role == "weights":
            paths.add(plan.graph.by_name[name].scope)
    return paths


def in_place(model: Any, config: dict[str, Any]) -> set[str]:
    """The paths of the layers that are quantized in place."""
    quantized = ModelQuantizer(config).quantize_model(model)
    return {path for path, module in quantized.named_modules() if isinstance(module, InPlace)}


def is_of_media(path: str) -> bool:
    words = ("vision", "visual", "projector", "connector", "audio", "qformer")
    return any(word in path for word in (*words, "language_projection"))


def test_layers_of_images_and_audio_stay_float_in_place() -> None:
    for build in MEDIA_MODELS.values():
        layers = in_place(build()[0], WEIGHT_INT8)
        assert layers and not any(map(is_of_media, layers))


@pytest.mark.parametrize(
    "name", ["llava", "mllama", *extended("idefics3", "blip2", "qwen2_audio")]
)
def test_a_trace_leaves_the_same_layers_float(name: str) -> None:
    layers = in_place(MEDIA_MODELS[name]()[0], WEIGHT_INT8)
    assert quantized_paths(WEIGHT_INT8, traced(name)) == layers


def test_every_preset_for_language_models_leaves_them_float() -> None:
    assert len(LANGUAGE_PRESETS) > 10
    for preset in LANGUAGE_PRESETS:
        layers = quantized_paths(PRESETS[preset], traced("llava"))
        assert any("mlp.up_proj" in path for path in layers), preset
        assert not any(map(is_of_media, layers)), preset


def test_keys_and_values_of_images_belong_to_the_attention_of_tokens() -> None:
    layers = quantized_paths(WEIGHT_INT8, traced("mllama"))
    cross = "model.language_model.layers.1.cross_attn"
    assert {f"{cross}.{part}_proj" for part in "qkvo"} <= layers


def test_texts_with_an_image_may_have_other_lengths() -> None:
    network = Network(traced("llava"))
    model, call = llava()
    longer = torch.cat([call["input_ids"], call["input_ids"][:, 7:]], dim=1)
    with torch.no_grad():
        for ids in (longer, longer[:, :9]):
            expected = model(**call | {"input_ids": ids}).logits
            assert torch.equal(network(**call | {"input_ids": ids})["logits"], expected)


@pytest.mark.parametrize("build", [clip, whisper])
def test_models_that_only_read_images_or_audio_are_quantized_whole(build: Any) -> None:
    model, call = build()
    encoders = ("vision_model.encoder.layers", "model.encoder.layers")
    traced = quantized_paths(WEIGHT_INT8, trace(prepare_for_traces(model), (), call))
    for layers in (traced, in_place(build()[0], WEIGHT_INT8)):
        assert any(path.startswith(encoders) for path in layers)


def test_who_names_the_vision_tower_gets_it_quantized() -> None:
    weight = WEIGHT_INT8["global_quant_config"]["weight"]
    config = {
        "global_quant_config": {"target_device": "CPU"},
        "layer_quant_config": {"kind:vision": {"weight": weight}},
    }
    layers = quantized_paths(config, traced("llava"))
    assert layers == in_place(llava()[0], config)
    assert layers and all(map(is_of_media, layers))


def exported(is_traced: bool, place: Path) -> tuple[Any, dict[str, Any]]:
    """A quantized model whose checkpoint is at a place, and a call of it."""
    if is_traced:
        model, call = llava()
        result = calibrate(prepare_for_traces(model), WEIGHT_INT8, [call])
        result.export("compressed-tensors", place)
        return result.network, call
    model, call = qwen2_vl()
    quantizer = ModelQuantizer(WEIGHT_INT8)
    quantized = quantizer.quantize_model(model)
    quantizer.export(quantized, place, [call])
    return quantized, call


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_checkpoint_lists_them_and_loads_with_equal_logits(
    is_traced: bool, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs quantizer-torch[llm]")
    transformers = pytest.importorskip("transformers")
    quantized, call = exported(is_traced, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert sum(map(is_of_media, ignored)) == len(ignored) - 1 > 3
    assert "lm_head" in ignored
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = loaded(**call).logits
        expected = quantized(**call)
    expected_logits = expected["logits"] if isinstance(expected, dict) else expected.logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
