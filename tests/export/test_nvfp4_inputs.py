"""Inputs in NVFP4 whose factors are calibrated: the values of compressed-tensors in float32, and
checkpoints of a tiny LLaMA that transformers loads.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engine import Engine
from support.llamas import llama, tokens
from torch import Tensor, nn

import quantizer
from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    QSchemeType,
    QuantizationConfig,
    QuantizationSpec,
)
from quantizer.config.model import QuantizationSpec as Spec
from quantizer.export.targets import EXPORTERS
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import sqnr_db

pytestmark = pytest.mark.slow

TARGET = "compressed-tensors"
for package in EXPORTERS[TARGET].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")

FP4: dict[str, Any] = {"dtype": "fp4", "scale_format": "e4m3", "group_size": 16}
NVFP4: dict[str, Any] = {
    "global_quant_config": {
        "weight": FP4 | {"ch_axis": 1},
        "input_tensors": FP4 | {"ch_axis": -1, "is_dynamic": "local"},
    },
    "exclude": ["kind:embedding", "kind:head"],
}
LARGEST = 448 * 6
LOCAL = Spec(
    dtype="fp4",
    scale_type="e4m3",
    qscheme="per_group",
    ch_axis=1,
    group_size=16,
    is_dynamic="local",
)


def reader_values(x: Tensor, words: dict[str, Any], factor: Tensor) -> Tensor:
    """What compressed-tensors makes of an input, in float32."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

    args = QuantizationArgs(**words)
    scale, zero_point = compute_dynamic_scales_and_zp(
        value=x, args=args, module=nn.Linear(1, 1), global_scale=factor
    )
    quantized: Tensor = fake_quantize(x, scale, zero_point, args, global_scale=factor)
    return quantized


def written_words(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    [group] = config["config_groups"].values()
    assert group["format"] == "nvfp4-pack-quantized"
    words: dict[str, Any] = group["input_activations"]
    return words


WORDS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "dynamic": "local",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}


@pytest.mark.parametrize("share", [1.0, 0.25, 100.0])
def test_values_are_those_of_compressed_tensors(share: float) -> None:
    """Also where the values are a quarter or a hundred times of those in calibration."""
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(64, 1, generator=generator).exp()
    x = torch.randn(64, 128, generator=generator) * spread
    scale = x.abs().max() / 6 / share
    quantizer_of_x = TensorQuantizer(LOCAL, scale, torch.tensor(0))
    theirs = reader_values(x, WORDS, torch.tensor([448.0]) / scale)
    assert torch.equal(quantizer_of_x(x), theirs)
    assert torch.equal(quantizer_of_x(x[:1]), theirs[:1]), "batches do not depend on others"


def largest_inputs(model: nn.Module) -> dict[str, float]:
    """The largest magnitude that each linear layer except the head reads in calibration."""
    largest: dict[str, float] = {}

    def watch(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = float(inputs[0].abs().max())
        largest[path] = max(value, largest.get(path, 0.0))

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.register_forward_pre_hook(partial(watch, path))
    with torch.no_grad():
        for batch in tokens():
            model(**batch)
    return largest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("nvfp4") / "out"
    result = quantizer.calibrate(llama().bfloat16(), NVFP4, tokens())
    return result, result.export(TARGET, folder), folder


def test_transformers_loads_calibrated_factors(checkpoint: tuple[Any, Any, Path]) -> None:
    """It finds the scales of groups in bfloat16, which moves some by a step."""
    result, verification, folder = checkpoint
    assert verification.sqnr_db > result.test().metrics["sqnr_db"] + 3
    assert written_words(folder) == WORDS


def test_factors_are_those_of_the_largest_inputs(checkpoint: tuple[Any, Any, Path]) -> None:
    _, _, folder = checkpoint
    stored = load_file(folder / "model.safetensors")
    largest = largest_inputs(llama().bfloat16())
    assert len(largest) == 7
    for path, value in largest.items():
        [factor] = stored[f"{path}.input_global_scale"].tolist()
        assert factor == pytest.approx(LARGEST / value, rel=1e-6)
    block = "model.layers.0."
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        prefix = block + ("self_attn." if "q_proj" in fused else "mlp.")
        factors = {float(stored[f"{prefix}{name}.input_global_scale"]) for name in fused}
        assert len(factors) == 1


def test_logits_are_those_of_the_readers_rounding_in_float32() -> None:
    result = quantizer.calibrate(llama(), NVFP4, tokens())
    model = ModelQuantizer(Config.from_dict(NVFP4)).quantize_model(llama(), tokens())
    reference = llama()
    reference.load_state_dict(model.state_dict(), strict=False)
    factors = {
        path: torch.tensor([LARGEST / value]) for path, value in largest_inputs(llama()).items()
    }

    def quantize(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return reader_values(inputs[0], WORDS, factors[path])

    for path in factors:
        hook = partial(quantize, path)
        reference.get_submodule(path).register_forward_pre_hook(hook)
    [batch] = tokens(1)
    with torch.no_grad():
        expected = reference(**batch).logits
        assert sqnr_db(expected, model(**batch).logits) > 100
        assert sqnr_db(expected, result.network(**batch).logits) > 100
        assert sqnr_db(expected, llama()(**batch).logits) < 30


def test_an_engine_with_scales_in_float32_computes_test_mode(
    checkpoint: tuple[Any, Any, Path],
) -> None:
    """It takes the largest factor of fused layers; its sums in bfloat16 are in another order."""
    result, _, folder = checkpoint
    model = llama().bfloat16()
    Engine(folder).load(model)
    [batch] = tokens(1)
    with torch.no_grad():
        expected = result.network(**batch).logits.float()
        assert sqnr_db(expected, model(**batch).logits.float()) > 40


def test_a_model_in_place_has_the_same_factors(
    checkpoint: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    """It is stored with them, and read back."""
    _, _, folder = checkpoint
    fp4: dict[str, Any] = {"dtype": Dtype.fp4, "scale_format": "e4m3", "group_size": 16}
    fp4["qscheme"] = QSchemeType.per_group
    inputs = QuantizationSpec(**fp4, ch_axis=-1, is_dynamic="local")
    level = QuantizationConfig(weight=QuantizationSpec(**fp4, ch_axis=1), input_tensors=inputs)
    settings = Config(level, exclude=["kind:embedding", "kind:head"])
    model = ModelQuantizer(settings).quantize_model(llama().bfloat16(), tokens())
    ModelQuantizer.export(model, tmp_path / "out", tokens())
    expected = load_file(folder / "model.safetensors")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in stored if "global_scale" in name} == {
        name for name in expected if "global_scale" in name
    }
    for name, value in stored.items():
        assert torch.equal(value, expected[name]), name
    ModelQuantizer.save(model, tmp_path / "saved")
    read = ModelQuantizer.load(llama().bfloat16(), tmp_path / "saved")
    [batch] = tokens(1)
    with torch.no_grad():
        assert torch.equal(read(**batch).logits, model(**batch).logits)
