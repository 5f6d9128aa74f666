"""The key-value cache in a checkpoint as transformers reads it, and what no target can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.attentions import Attention, Fused, batches, blocks, cache_config
from support.llamas import llama, tokens
from torch import nn

import quantizer
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.errors import UsageError
from quantizer.export.refusals import planned_refusals
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS
from quantizer.graph.tracing.trace import trace
from quantizer.plan.resolve import resolve_plan

TARGET = "compressed-tensors"
for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

Spec = dict[str, Any]
FP8: Spec = {"dtype": "fp8_e4m3"}
HEADS: Spec = {"dtype": "int8", "qscheme": "per_channel"}
NAMES = ("k_proj", "v_proj")


def written(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The quantization config, and the scales of the cache."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    scales = {name: value for name, value in tensors.items() if name[-8:-6] in (".k", ".v")}
    return config, scales


def largest_keys_and_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The largest magnitude of each head of what the model of one block caches."""
    largest: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for batch in tokens():
        with torch.no_grad():
            [layer] = model(**batch, use_cache=True).past_key_values.layers
        largest["k"].append(layer.keys.abs().amax((0, 2, 3)))
        largest["v"].append(layer.values.abs().amax((0, 2, 3)))
    return {part: torch.stack(values).amax(0) for part, values in largest.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.shows(
    "LLaMA (random), its key-value cache in fp8", "transformers with compressed-tensors"
)
def test_transformers_computes_with_the_cache_of_a_checkpoint(tmp_path: Path) -> None:
    model = llama()
    config = cache_config(FP8, *NAMES, exclude=["kind:embedding", "kind:head"])
    config["global_quant_config"] = {"weight": {"dtype": "int8"}}
    result = quantizer.calibrate(model, config, tokens())
    verified = result.export(TARGET, tmp_path / "fp8")
    assert verified.sqnr_db is not None
    assert verified.sqnr_db > 100
    stated, scales = written(tmp_path / "fp8")
    assert stated["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    largest = largest_keys_and_values(model)
    for part, values in largest.items():
        scale = scales[f"model.layers.0.self_attn.{part}_scale"]
        torch.testing.assert_close(scale, values.amax().reshape(1) / 448)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
def test_a_checkpoint_may_have_only_its_cache_quantized(tmp_path: Path) -> None:
    model = llama(attn_implementation="eager")
    result = quantizer.calibrate(model, cache_config(HEADS, *NAMES), tokens())
    verified = result.export(TARGET, tmp_path / "heads")
    assert verified.sqnr_db is not None
    assert verified.sqnr_db > 100
    assert "the key-value cache is int8, and vLLM and SGLang have only fp8 there" in (
        verified.remarks
    )
    stated, scales = written(tmp_path / "heads")
    assert (stated["config_groups"], stated["format"]) == ({}, "dense")
    assert stated["kv_cache_scheme"]["strategy"] == "attn_head"
    # Two heads, which two queries each read
    largest = largest_keys_and_values(model)
    for part, values in largest.items():
        scale = scales[f"model.layers.0.self_attn.{part}_scale"]
        torch.testing.assert_close(scale, values.reshape(2, 1, 1) / 127)


def refused(config: Spec, target: str, *attentions: nn.Module) -> list[tuple[str, str]]:
    """The role and the reason of each refusal of a plan."""
    graph = trace(blocks(*attentions or (Attention(2),)), (batches(1)[0],))
    read = check_document(Document.of(config, "config")).require()
    plan = resolve_plan(read, graph, graph)
    refusals = planned_refusals(CHECKED_TARGETS[target], plan)
    return [(refusal.role, refusal.why) for refusal in refusals]


def both(spec: Spec, other: Spec | None = None, **more: Any) -> Spec:
    config = cache_config(spec, *NAMES, **more)
    if other is not None:
        config["kv_cache_quant_config"]["*.v_proj"] = {"output_tensors": other}
    return config


REFUSED: dict[str, tuple[Spec, str, str]] = {
    "tokens": (
        both({"dtype": "fp8_e4m3", "qscheme": "per_token", "is_dynamic": True}),
        "input_1",
        "has a scale for each token",
    ),
    "dynamic int8": (
        both({"dtype": "int8", "is_dynamic": True}),
        "input_1",
        "is dynamic with the scale absmax / 127, and readers have absmax / 127.5",
    ),
    "rounding": (
        both({"dtype": "int8", "round_method": "floor"}),
        "input_1",
        "is rounded by floor",
    ),
    "two schemes": (both(FP8, HEADS), "input_2", "is quantized otherwise than other keys"),
    "keys alone": (cache_config(FP8, "k_proj"), "input_2", "stays float, and the cache"),
    "before the rotation": (
        both(FP8, kv_cache_post_rope=False),
        "activation",
        "is quantized between operators",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_checkpoints_cannot_say_of_a_cache_is_refused(case: str) -> None:
    config, role, why = REFUSED[case]
    reasons = [text for refused_role, text in refused(config, TARGET) if refused_role == role]
    assert [text for text in reasons if text.startswith(why)] == reasons != []


def test_a_cache_that_readers_can_hold_is_not_refused() -> None:
    for spec in (FP8, HEADS, {"dtype": "fp8_e4m3", "is_dynamic": True}):
        assert refused(both(spec), TARGET) == []


def test_an_attention_that_readers_do_not_recognize_is_refused() -> None:
    reasons = refused(cache_config(FP8, "query_key_value"), TARGET, Fused())
    assert [text.partition(",")[0] for _, text in reasons] == ["belongs to layers.0.attn"] * 2


def test_fp8_keys_are_refused_where_onnx_runtime_transposes_them() -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    why = "is fp8_e4m3 and is transposed, which ONNX Runtime cannot do"
    assert refused(both(FP8), "onnx") == [("input_1", why)]
    assert refused(both(FP8), "onnx", Attention(2, is_written_out=True)) == []
    assert refused(both({"dtype": "int8"}), "onnx") == []


def test_a_reader_that_finds_no_cache_is_refused_in_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers 5.24 has given an argument of attentions another name."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    model = llama()
    forward = LlamaAttention.forward

    def renamed(self: Any, *args: Any, cache: Any = None, **others: Any) -> Any:
        return forward(self, *args, **others)

    monkeypatch.setattr(LlamaAttention, "forward", renamed)
    config = cache_config(FP8, *NAMES)
    with pytest.raises(UsageError, match="quantizes no cache with") as error:
        quantizer.quantize(model, tokens(), TARGET, config=config)
    assert "pip install 'transformers<5.24'" in str(error.value.help)
