"""Checkpoints as engines read them: fused layers, targets of groups, heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export.test_compressed_tensors import (
    CHANNEL,
    DYNAMIC,
    FLOAT,
    FP8,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    STATIC,
    TARGET,
    TENSOR,
    TOKEN,
    Spec,
    config,
    written,
)
from support.engine import Engine
from support.extended import extended_except
from support.llamas import llama, tokens
from torch import Tensor

import quantizer
from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS

pytestmark = pytest.mark.slow

for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")


def uneven_llama(dtype: torch.dtype = torch.float32) -> Any:
    """A LLaMA whose fused layers have different ranges, as those of trained ones do."""
    model = llama()
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.k_proj.weight *= 6
        layer.self_attn.v_proj.weight *= 0.3
        layer.mlp.gate_proj.weight *= 3
    return model.to(dtype)


def exported(settings: Spec, folder: Path, model: Any) -> Path:
    quantizer.calibrate(model, settings, tokens()).export(TARGET, folder)
    return folder


def logits(folder: Path, model: Any, *, names_first: bool) -> tuple[Tensor, Tensor]:
    """The logits of an engine, and those of transformers."""
    ids = tokens(1)[0]["input_ids"]
    Engine(folder, names_first=names_first).load(model)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(ids).logits.float(), loaded(ids).logits.float()


MIXED = config(INT4, layer_quant_config={"*.down_proj": {"weight": INT8}})
# The group of most layers comes first, and the fused layers of mlp are in another
FUSED_LAST = config(
    INT4,
    layer_quant_config={
        "*.gate_proj": {"weight": INT8, "input_tensors": DYNAMIC},
        "*.up_proj": {"weight": INT8, "input_tensors": DYNAMIC},
    },
)
CASES: dict[str, tuple[Spec, torch.dtype]] = {
    "nvfp4": (config(NVFP4), torch.bfloat16),
    "nvfp4, gptq": (config(NVFP4, algo_config={"name": "gptq"}), torch.bfloat16),
    "nvfp4, awq": (config(NVFP4, algo_config={"name": "awq"}), torch.bfloat16),
    "mxfp4": (config(MXFP4), torch.bfloat16),
    "fp8, static inputs": (
        config(FP8 | TENSOR, FP8 | TENSOR | {"is_dynamic": False}),
        torch.float32,
    ),
    "fp8, dynamic inputs": (config(FP8 | CHANNEL, FP8 | TOKEN), torch.float32),
    "int8, static inputs": (config(INT8, STATIC), torch.float32),
    "int8, dynamic inputs": (config(INT8, DYNAMIC), torch.float32),
    "a quantized head": (config(INT4) | {"exclude": ["kind:embedding"]}, torch.float32),
    "two widths": (MIXED, torch.float32),
    "fused layers in the second group": (FUSED_LAST, torch.float32),
}
FURTHER = ("nvfp4, awq", "fp8, static inputs", "int8, static inputs")


@pytest.mark.parametrize(
    "name", extended_except(CASES, *(name for name in CASES if name not in FURTHER))
)
def test_an_engine_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    settings, dtype = CASES[name]
    folder = exported(settings, tmp_path / "out", uneven_llama(dtype))
    for names_first in (True, False):
        engine, reference = logits(folder, uneven_llama(dtype), names_first=names_first)
        # Products of bfloat16 are summed in another order
        bound = 0.02 if dtype == torch.bfloat16 else 1e-5
        assert (engine - reference).abs().max() < bound * reference.abs().max()


def test_layers_quantized_in_place_share_their_factor(tmp_path: Path) -> None:
    model = quantizer.ModelQuantizer(config(NVFP4)).quantize_model(
        uneven_llama(torch.bfloat16), tokens()
    )
    quantizer.ModelQuantizer.export(model, tmp_path / "out", tokens())
    engine, reference = logits(tmp_path / "out", uneven_llama(torch.bfloat16), names_first=True)
    assert (engine - reference).abs().max() < 0.02 * reference.abs().max()


REFUSED = {
    "two widths": (
        {"layer_quant_config": {"*.q_proj": {"weight": INT8}}},
        r"v_proj\S*: each has another scheme than model.layers.0.self_attn.q_proj",
    ),
    "one in float": (
        {"exclude": [*FLOAT, "*.up_proj"]},
        r"up_proj\S* stays float, unlike model.layers.0.mlp.gate_proj",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fused_layers_of_two_schemes_are_refused(name: str, tmp_path: Path) -> None:
    changes, why = REFUSED[name]
    with pytest.raises(UsageError, match=f"{why}, and engines fuse both") as refused:
        exported(config(INT4) | changes, tmp_path / "out", llama())
    assert refused.value.help is not None
    assert "exclude all of them" in refused.value.help


def test_several_groups_have_exact_names_and_those_of_fused_layers(tmp_path: Path) -> None:
    folder = exported(MIXED, tmp_path / "out", llama())
    groups = written(folder)["quantization_config"]["config_groups"]
    block = "model.layers.0"
    assert groups["group_0"]["targets"] == [
        f"{block}.mlp.gate_proj",
        f"{block}.mlp.gate_up_proj",
        f"{block}.mlp.up_proj",
        *(f"{block}.self_attn.{name}_proj" for name in ("k", "o", "q", "qkv", "v")),
    ]
    assert groups["group_1"]["targets"] == [f"{block}.mlp.down_proj"]


def test_a_quantized_head_is_a_target_beside_the_class(tmp_path: Path) -> None:
    settings = config(INT4) | {"exclude": ["kind:embedding"]}
    folder = tmp_path / "out"
    verification = quantizer.calibrate(llama(), settings, tokens()).export(TARGET, folder)
    groups = written(folder)["quantization_config"]["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear", "lm_head"]
    assert "SGLang, and vLLM before" in verification.remarks[0]
