"""Checkpoints of models whose layers fold nowhere, are no plain linear layers, or cannot be read
when they are packed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export.test_compressed_tensors import DYNAMIC, INT4, INT8, NVFP4, TARGET, config
from support.gguf_templates import template as gguf_template
from support.llamas import llama, tokens

import quantizer
from quantizer.errors import UsageError, VerificationError
from quantizer.export.targets import EXPORTERS

pytestmark = pytest.mark.slow

for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}


def phi() -> Any:
    """A model whose second layer of the MLP reads a GELU, into which nothing folds."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.PhiForCausalLM(transformers.PhiConfig(**sizes, **heads, **IDS)).eval()


def falcon() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1}
    settings = transformers.FalconConfig(**sizes, num_attention_heads=2, **IDS)
    return transformers.FalconForCausalLM(settings).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **IDS)).eval()


def opt() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **layers, **IDS)).eval()


def exported(model: Any, settings: dict[str, Any], folder: Path) -> Any:
    return quantizer.calibrate(model, settings, tokens()).export(TARGET, folder)


def test_factors_that_fold_nowhere_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = json.loads(Path("configs/smoothquant_int8.json").read_text())
    with caplog.at_level("INFO"):
        written = exported(phi(), settings, tmp_path / "out")
    assert written.max_difference < 1e-6
    assert "no layer takes up factors of its inputs" in caplog.text
    settings["pre_quant_opt_config"]["online"] = True
    with pytest.raises(UsageError, match=r"fc2\]/input_scale was inserted by an algorithm"):
        exported(phi(), settings, tmp_path / "other")


def test_a_subclass_of_linear_is_stored(tmp_path: Path) -> None:
    assert exported(falcon(), config(INT8, DYNAMIC), tmp_path / "out").max_difference < 1e-6


PACKED = "the model's code reads the weight of FalconLinear, which is packed"


def test_packed_layers_whose_weight_is_read_are_loaded_dequantized(tmp_path: Path) -> None:
    written = exported(falcon(), config(INT4), tmp_path / "out")
    assert written.max_difference == 0
    [remark] = [text for text in written.remarks if PACKED in text]
    assert "CompressedTensorsConfig(dequantize=True)" in remark


def test_the_reason_is_the_code_of_the_model_in_formats_of_bfloat16_too(tmp_path: Path) -> None:
    written = exported(falcon().bfloat16(), config(NVFP4), tmp_path / "out")
    [remark] = [text for text in written.remarks if "dequantize=True" in text]
    assert PACKED in remark
    assert "another dtype" not in remark


def test_packed_layers_of_two_schemes_are_refused_if_their_weight_is_read(
    tmp_path: Path,
) -> None:
    settings = config(INT4)
    settings["layer_quant_config"] = {"*.dense": {"weight": INT8}}
    with pytest.raises(VerificationError, match=PACKED) as refused:
        exported(falcon(), settings, tmp_path / "out")
    assert refused.value.help is not None
    assert "which are not packed" in refused.value.help


def test_layers_that_readers_leave_in_float_are_named(tmp_path: Path) -> None:
    why = "transformer.h.0.attn.c_attn is a Conv1D, which readers leave in float"
    with pytest.raises(UsageError, match=why):
        exported(gpt2(), config(INT4), tmp_path / "out")


@pytest.mark.parametrize("template", ["", "other.gguf"])
def test_an_architecture_that_gguf_lacks_is_refused_before_calibration(
    template: str, tmp_path: Path
) -> None:
    options = {}
    if template:
        options["gguf_template"] = tmp_path / template
        gguf_template(options["gguf_template"], llama())
    with pytest.raises(UsageError, match="gguf"):
        quantizer.quantize(opt(), tokens(), to="gguf", folder=tmp_path / "out", **options)
    assert not list(tmp_path.glob("out/*"))


def test_inputs_whose_tokens_transformers_does_not_tell_apart_are_named(tmp_path: Path) -> None:
    written = exported(opt(), config(INT8, DYNAMIC), tmp_path / "out")
    [remark] = [text for text in written.remarks if "one scale for several tokens" in text]
    assert "[fc1]" in remark and "[fc2]" in remark and "q_proj" not in remark
