"""Quantized folders are read as float models: every layout, as the packages that define it
write and read it; damaged folders are sentences.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.llamas import llama, saved
from support.moe import mixture
from torch import Tensor

from quantizer.errors import ModelError
from quantizer.sources.hugging_face.loader import load_hugging_face
from quantizer.sources.models import load_model
from quantizer.storage.deferred_tensor import DeferredTensor

Config = dict[str, Any]
Parts = dict[str, Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
DOWN = "model.layers.0.mlp.down_proj"
ATTENTION_OUTPUT = "model.layers.0.self_attn.o_proj"


def quantized(
    folder: Path,
    settings: Config,
    parts_of: Callable[[Tensor], Parts],
    dtype: torch.dtype = torch.float32,
    model: Any = None,
) -> Path:
    """The folder of a model, by default a LLaMA, whose linear layers are stored as `parts_of`
    returns them.
    """
    saved(folder, (model or llama(**SIZES)).to(dtype))
    stored: Parts = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        path, _, part = name.rpartition(".")
        if path.endswith("_proj") and part == "weight":
            for new_part, value in parts_of(tensor).items():
                stored[f"{path}.{new_part}"] = value.contiguous()
        else:
            stored[name] = tensor
    rewrite(folder, lambda tensors: tensors.clear() or tensors.update(stored))
    set_config(folder, quantization_config=settings)
    return folder


def rewrite(folder: Path, change: Callable[[Parts], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def layer_parts(folder: Path, path: str) -> Parts:
    stored = load_file(folder / "model.safetensors")
    return {
        name.removeprefix(f"{path}."): value
        for name, value in stored.items()
        if name.startswith(f"{path}.")
    }


def row_scale(weight: Tensor, group_size: int, largest: float) -> Tensor:
    groups = weight.float().unflatten(-1, (-1, group_size))
    return groups.abs().amax(-1) / largest


# compressed-tensors


def scheme_of(weights: Config, layout: str) -> Any:
    compressed_tensors = pytest.importorskip("compressed_tensors")
    return compressed_tensors.quantization.QuantizationScheme(
        targets=["Linear"], weights=weights, format=layout
    )


def compressor(layout: str) -> Any:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    return compressors.BaseCompressor.get_value_from_registry(layout)


INT = {"type": "int", "symmetric": True}
FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True}
FP4 = {"type": "float", "num_bits": 4, "symmetric": True}
LAYOUTS: dict[str, tuple[str, Config, int, float]] = {
    "int4 in groups": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32},
        32,
        7,
    ),
    "int3 per channel": ("pack-quantized", INT | {"num_bits": 3, "strategy": "channel"}, 0, 3),
    "asymmetric int4 in groups": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
        16,
        7,
    ),
    "int8": ("int-quantized", INT | {"num_bits": 8, "strategy": "channel"}, 0, 127),
    "asymmetric int8": (
        "int-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "symmetric": False},
        0,
        127,
    ),
    "fp8 per channel": ("float-quantized", FLOAT8 | {"strategy": "channel"}, 0, 448),
    "fp8 in blocks": (
        "naive-quantized",
        FLOAT8 | {"strategy": "block", "block_structure": [48, 64]},
        64,
        448,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        32,
        448,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        FP4
        | {
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        },
        16,
        6,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        FP4
        | {
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        },
        32,
        6,
    ),
}


def compressed_parts(name: str) -> Callable[[Tensor], Parts]:
    """What compressed-tensors stores of a weight."""
    layout, weights, group_size, largest = LAYOUTS[name]

    def parts_of(weight: Tensor) -> Parts:
        scale = row_scale(weight, group_size or weight.shape[-1], largest)
        block = weights.get("block_structure")
        if block:
            rows = -(-len(weight) // block[0])
            scale = torch.stack([part.amax(0) for part in scale.split(block[0])])
            assert len(scale) == rows
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
        if weights.get("scale_dtype") == "torch.uint8":
            state["weight_scale"] = torch.exp2(scale.log2().ceil()).to(weight.dtype)
        if layout.startswith("nvfp4"):
            state["weight_global_scale"] = (448 / scale.max()).reshape(1)
            codes = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn)
            state["weight_scale"] = codes.float()
        if not weights["symmetric"]:
            zero_points = torch.arange(scale.numel()).view(scale.shape) % 5 - 2
            state["weight_zero_point"] = zero_points.to(torch.int8)
        parts: Parts = compressor(layout).compress(state, scheme_of(weights, layout))
        return parts

    return parts_of


def compressed_settings(name: str, **more: Any) -> Config:
    layout, weights, _, _ = LAYOUTS[name]
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_compressed_tensors_decompresses_to_the_same_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    layout, weights, _, _ = LAYOUTS[name]
    place = quantized(tmp_path, compressed_settings(name), compressed_parts(name), dtype=dtype)
    model = load_hugging_face(place)
    assert all(isinstance(parameter, DeferredTensor) for parameter in model.parameters())
    for path in (DOWN, ATTENTION_OUTPUT):
        expected = compressor(layout).decompress(
            layer_parts(place, path), scheme_of(weights, layout)
        )["weight"]
        values = model.get_parameter(f"{path}.weight")
        assert values.dtype == dtype
        # The package computes fp4 in bfloat16
        is_rounded = layout.startswith("nvfp4")
        assert torch.equal(
            values.bfloat16() if is_rounded else values,
            expected.bfloat16() if is_rounded else expected,
        )


# The layouts below are written here once more, from the source of the packages that define them


def words(codes: Tensor, bits: int) -> Tensor:
    """The rows of a matrix of codes as streams of bits in words, the first code in the lowest
    bits: `pack` of AutoGPTQ 0.7 (auto_gptq/nn_modules/qlinear/qlinear_cuda.py), also for 3 bits,
    where a code may begin in one word and end in the next.
    """
    rows = []
    for row in codes.tolist():
        stream = sum(int(code) << bits * index for index, code in enumerate(row))
        count = len(row) * bits // 32
        rows.append([stream >> 32 * index & 0xFFFFFFFF for index in range(count)])
    return torch.from_numpy(numpy.array(rows, dtype=numpy.uint32).view(numpy.int32))


def drawn_codes(weight: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [inputs, outputs], zero points and scales [groups, outputs] as GPTQ could find
    them.
    """
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(outputs * bits + inputs)
    codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (groups, outputs), generator=generator)
    scales = torch.rand(groups, outputs, generator=generator) / 16
    return codes, zeros, scales.half()


def gptq_parts(
    bits: int, group_size: int, *, order: bool = False, offset: int = 1
) -> Callable[[Tensor], Parts]:
    def parts_of(weight: Tensor) -> Parts:
        inputs = weight.shape[1]
        groups = inputs // group_size
        codes, zeros, scales = drawn_codes(weight, bits, groups)
        group_of_input = torch.arange(inputs) // group_size
        if order:
            generator = torch.Generator().manual_seed(7)
            group_of_input = group_of_input[torch.randperm(inputs, generator=generator)]
        return {
            "qweight": words(codes.t(), bits).t(),
            "qzeros": words(zeros - offset, bits),
            "scales": scales,
            "g_idx": group_of_input.int(),
        }

    return parts_of


def gptq_settings(bits: int, group_size: int, **more: Any) -> Config:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", [False, True], ids=["groups", "act_order"])
def test_gptq_in_the_layout_of_autogptq(bits: int, order: bool, tmp_path: Path) -> None:
    parts_of = gptq_parts(bits, 32, order=order)
    place = quantized(tmp_path, gptq_settings(bits, 32), parts_of, dtype=torch.float16)
    model = load_hugging_face(place)
    for path in (DOWN, ATTENTION_OUTPUT):
        weight = model.get_parameter(f"{path}.weight")
        groups = weight.shape[1] // 32
        codes, zeros, scales = drawn_codes(weight, bits, groups)
        group_of_input = layer_parts(place, path)["g_idx"].long()
        expected = scales[group_of_input] * (codes - zeros[group_of_input])
        assert torch.equal(weight, expected.t())
        assert weight.dtype == torch.float16


@pytest.mark.parametrize(
    ("settings", "offset"),
    [
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq"}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, 1),
    ],
)
def test_gptq_formats_and_rules(settings: Config, offset: int, tmp_path: Path) -> None:
    parts_of = gptq_parts(8, 64, offset=offset)
    place = quantized(tmp_path, gptq_settings(8, 64) | settings, parts_of)
    weight = load_hugging_face(place).get_parameter(f"{DOWN}.weight")
    codes, zeros, scales = drawn_codes(weight, 8, 2)
    expected = scales.float().repeat_interleave(64, 0) * (
        codes - zeros.repeat_interleave(64, 0)
    )
    assert torch.equal(weight, expected.t())


def test_gptq_without_lists_of_groups(tmp_path: Path) -> None:
    """The settings are in the file that AutoGPTQ wrote before transformers knew GPTQ."""

    def parts_of(weight: Tensor) -> Parts:
        parts = gptq_parts(4, weight.shape[1])(weight)
        del parts["g_idx"]
        return parts

    place = quantized(tmp_path, {}, parts_of)
    (place / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": -1}))
    weight = load_hugging_face(place).get_parameter(f"{DOWN}.weight")
    codes, zeros, scales = drawn_codes(weight, 4, 1)
    assert torch.equal(weight, (scales.float() * (codes - zeros)).t())


def awq_words(codes: Tensor) -> Tensor:
    """Eight columns in a word, in the order of `WQLinear_GEMM.from_linear` of AutoAWQ 0.2
    (awq/modules/linear/gemm.py).
    """
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int32)
    for column in range(packed.shape[1]):
        for place in range(8):
            source = codes[:, column * 8 + order_map[place]].int()
            packed[:, column] |= source << (place * 4)
    return packed


def awq_parts(weight: Tensor) -> Parts:
    codes, zeros, scales = drawn_codes(weight, 4, weight.shape[1] // 32)
    return {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def test_awq_in_the_layout_of_autoawq(tmp_path: Path) -> None:
    place = quantized(tmp_path, AWQ, awq_parts, dtype=torch.float16)
    model = load_hugging_face(place)
    for path in (DOWN, ATTENTION_OUTPUT):
        weight = model.get_parameter(f"{path}.weight")
        codes, zeros, scales = drawn_codes(weight, 4, weight.shape[1] // 32)
        expected = scales.repeat_interleave(32, 0) * (codes - zeros.repeat_interleave(32, 0))
        assert torch.equal(weight, expected.t())


def fp8_parts(size: tuple[int, int]) -> Callable[[Tensor], Parts]:
    """As `weight_dequant` of DeepSeek-V3 (inference/kernel.py) reads them: a scale for each
    block, also for those at the edges.
    """

    def parts_of(weight: Tensor) -> Parts:
        rows, columns = weight.shape
        scale = torch.arange(1, 1 + -(-rows // size[0]) * -(-columns // size[1])) / 1024
        return {
            "weight": (weight.float() * 400).to(torch.float8_e4m3fn),
            "weight_scale_inv": scale.view(-(-rows // size[0]), -1),
            "input_scale": torch.ones(()),
        }

    return parts_of


@pytest.mark.parametrize("size", [(128, 128), (48, 40), (16, 32)])
def test_fp8_in_blocks(
    size: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": list(size)}
    place = quantized(tmp_path, settings, fp8_parts(size), dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        model = load_hugging_face(place)
    assert caplog.messages == [
        f"{tmp_path} is quantized by fp8: 7 tensors dequantized, and the dequantized model is "
        "the float model here; input_scale of inputs and caches are ignored"
    ]
    parts = layer_parts(place, DOWN)
    expected = parts["weight"].float()
    for row, column in numpy.ndindex(*expected.shape):
        scale = parts["weight_scale_inv"][row // size[0], column // size[1]]
        expected[row, column] *= scale
    assert torch.equal(model.get_parameter(f"{DOWN}.weight"), expected.bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (-1, 1), (-1,)])
def test_fp8_with_scales_of_tensors_and_rows(shape: tuple[int, ...], tmp_path: Path) -> None:
    def parts_of(weight: Tensor) -> Parts:
        count = len(weight) if -1 in shape else 1
        scale = torch.arange(1, 1 + count) / 1024
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scale.view(shape)}

    place = quantized(tmp_path, {"quant_method": "fp8", "weight_block_size": None}, parts_of)
    parts = layer_parts(place, DOWN)
    weight = load_hugging_face(place).get_parameter(f"{DOWN}.weight")
    assert torch.equal(weight, parts["weight"].float() * parts["weight_scale"].view(-1, 1))


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 32}
    config = transformers.GptOssConfig(**sizes, **heads, **experts)
    saved(tmp_path, transformers.GptOssForCausalLM(config).bfloat16())
    path = "model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(1)
    packed: Parts = {}
    for name, outputs, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        shape = (2, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
        packed[f"{name}_blocks"] = blocks.to(torch.uint8)
        scales = torch.randint(115, 125, shape, generator=generator)
        packed[f"{name}_scales"] = scales.to(torch.uint8)

    def pack(tensors: Parts) -> None:
        for name, value in packed.items():
            tensors.pop(f"{path}.{name.removesuffix('_blocks')}", None)
            tensors[f"{path}.{name}"] = value

    rewrite(tmp_path, pack)
    set_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    model = load_hugging_face(tmp_path)
    for name in ("gate_up_proj", "down_proj"):
        expected = mxfp4.convert_moe_packed_tensors(
            packed[f"{name}_blocks"], packed[f"{name}_scales"]
        )
        weight = model.get_parameter(f"{path}.{name}")
        assert isinstance(weight, DeferredTensor)
        assert torch.equal(weight, expected)


# Folders that transformers has to rearrange, or whose settings differ from layer to layer


def test_experts_of_one_layer_each_are_put_together(tmp_path: Path) -> None:
    model = mixture("Qwen3Moe", num_hidden_layers=1, moe_intermediate_size=32)
    plain = saved(tmp_path / "plain", model)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    place = quantized(tmp_path / "coded", settings, fp8_parts((16, 16)), model=model)
    loaded = load_hugging_face(place)
    assert loaded.name_or_path == str(place)
    assert loaded.config.name_or_path == str(place)
    assert not hasattr(loaded.config, "quantization_config")
    path = "model.layers.0.mlp.experts.1.down_proj"
    parts = layer_parts(place, path)
    scale = parts["weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    down = loaded.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(down[1], parts["weight"].float() * scale)
    assert loaded.state_dict().keys() == load_hugging_face(plain).state_dict().keys()


def test_a_config_without_architectures_means_the_base_model(tmp_path: Path) -> None:
    place = quantized(tmp_path, AWQ, awq_parts)
    whole = load_hugging_face(place)
    set_config(place, architectures=None)
    rewrite(place, lambda tensors: tensors.pop("lm_head.weight"))
    base = load_hugging_face(place)
    assert type(base).__name__ == "LlamaModel"
    name = "layers.0.mlp.down_proj.weight"
    assert torch.equal(base.get_parameter(name), whole.get_parameter(f"model.{name}"))


def test_groups_name_their_layers(tmp_path: Path) -> None:
    """By name, by pattern and by class; the last is for all that the others do not name."""

    def parts_of(weight: Tensor) -> Parts:
        name = "int8" if weight.shape[0] == 128 else "int4 in groups"
        return compressed_parts(name)(weight)

    settings = compressed_settings("int8")
    groups = [
        (["re:.*self_attn.*"], "int4 in groups"),
        ([DOWN], "int4 in groups"),
        (["Linear"], "int8"),
    ]
    settings["config_groups"] = {
        f"group_{number}": {"targets": targets, "weights": LAYOUTS[name][1]}
        for number, (targets, name) in enumerate(groups)
    }
    model = load_hugging_face(quantized(tmp_path, settings, parts_of))
    plain = llama(**SIZES)
    for path in (DOWN, ATTENTION_OUTPUT, "model.layers.0.mlp.up_proj"):
        weight = plain.get_parameter(f"{path}.weight")
        error = (model.get_parameter(f"{path}.weight") - weight).abs().max()
        assert error <= weight.abs().max() / (127 if "up_proj" in path else 7)


def test_early_versions_of_compressed_tensors(tmp_path: Path) -> None:
    """Zero points were bytes, and columns in another order listed their groups."""
    name = "asymmetric int4 in groups"
    place = quantized(tmp_path, compressed_settings(name), compressed_parts(name))
    expected = load_hugging_face(place).get_parameter(f"{DOWN}.weight").load()
    parts = layer_parts(place, DOWN)
    groups = parts["weight_scale"].shape[1]
    zero_points = torch.arange(64 * groups).view(64, groups) % 5 - 2

    def store_as_before(tensors: Parts) -> None:
        tensors[f"{DOWN}.weight_zero_point"] = zero_points.to(torch.int8)
        tensors[f"{DOWN}.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)

    rewrite(place, store_as_before)
    assert torch.equal(load_hugging_face(place).get_parameter(f"{DOWN}.weight"), expected)
    order = torch.arange(128) // 16
    rewrite(place, lambda tensors: tensors.update({f"{DOWN}.weight_g_idx": order.flip(0)}))
    flipped = load_hugging_face(place).get_parameter(f"{DOWN}.weight").load()
    codes = (expected / parts["weight_scale"].repeat_interleave(16, 1)).round()
    codes += zero_points.repeat_interleave(16, 1)
    again = (codes - zero_points[:, order.flip(0)]) * parts["weight_scale"][:, order.flip(0)]
    assert torch.equal(flipped, again)


def test_code_of_the_folder_runs_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    place = quantized(tmp_path / "model", AWQ, awq_parts)
    expected = load_hugging_face(place).get_parameter(f"{DOWN}.weight").load()
    (place / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    set_config(place, architectures=["Own"], model_type="own", auto_map=code)
    with pytest.raises(ModelError, match="Own is code in this folder"):
        load_hugging_face(place)
    model = load_hugging_face(place, trust=True)
    assert type(model).__name__ == "Own"
    assert torch.equal(model.get_parameter(f"{DOWN}.weight"), expected)


# Damaged folders


def without(part: str) -> Callable[[Parts], Any]:
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def replaced(part: str, value: Tensor) -> Callable[[Parts], Any]:
    return lambda tensors: tensors.update({f"{DOWN}.{part}": value})


GPTQ4 = (gptq_settings(4, 32), gptq_parts(4, 32))
INT4 = (compressed_settings("int4 in groups"), "int4 in groups")
ASYMMETRIC = (compressed_settings("asymmetric int8"), "asymmetric int8")
NVFP4 = (compressed_settings("nvfp4"), "nvfp4")
FP8 = ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8_parts((32, 32)))
DAMAGED: dict[str, tuple[Any, Callable[[Parts], Any], str]] = {
    "gptq without scales": (GPTQ4, without("scales"), "has no model.*scales, which its layer"),
    "gptq, short zeros": (
        GPTQ4,
        replaced("qzeros", torch.zeros(4, 7, dtype=torch.int32)),
        r"qzeros has the shape \[4, 7\], not \[4, 8\]",
    ),
    "gptq, scales of integers": (
        GPTQ4,
        replaced("scales", torch.zeros(4, 64, dtype=torch.int32)),
        "scales is int32, not float16 or bfloat16 or float32",
    ),
    "gptq, groups that are missing": (
        GPTQ4,
        replaced("g_idx", torch.full((128,), 4, dtype=torch.int32)),
        "g_idx names groups outside of 0 to 3",
    ),
    "gptq, negative groups": (
        GPTQ4,
        replaced("g_idx", torch.full((128,), -1, dtype=torch.int32)),
        "g_idx names groups outside of 0 to 3",
    ),
    "gptq, codes of other rows": (
        GPTQ4,
        replaced("qweight", torch.zeros(15, 64, dtype=torch.int32)),
        r"g_idx has the shape \[128\], not \[120\]",
    ),
    "gptq, no codes": (
        GPTQ4,
        replaced("qweight", torch.zeros(0, 64, dtype=torch.int32)),
        "qweight has no values",
    ),
    "awq, three axes": (
        (AWQ, awq_parts),
        replaced("qweight", torch.zeros(2, 2, 2, dtype=torch.int32)),
        r"qweight has the shape \[2, 2, 2\], not 2 axes",
    ),
    "awq, other groups": (
        (AWQ | {"group_size": 64}, awq_parts),
        lambda tensors: None,
        r"scales has the shape \[4, 64\], not \[2, 64\]",
    ),
    "fp8 without scales": (FP8, without("weight_scale_inv"), "has no .*weight_scale_inv"),
    "fp8, other blocks": (
        FP8,
        replaced("weight_scale_inv", torch.ones(2, 3)),
        r"weight_scale_inv has the shape \[2, 3\], not \[2, 4\]",
    ),
    "fp8, float codes": (
        FP8,
        replaced("weight", torch.ones(64, 128)),
        "weight is float32, not float8_e4m3fn or float8_e5m2",
    ),
    "fp8, another tensor in fp8": (
        FP8,
        replaced("bias", torch.ones(64).to(torch.float8_e4m3fn)),
        "bias has fp8 numbers that no scale belongs to",
    ),
    "fp8, NaN": (
        FP8,
        replaced("weight_scale_inv", torch.full((2, 4), torch.nan)),
        "the weights hold NaN or Inf: 8192 of 8192 values of model.*down_proj.weight",
    ),
    "int4 without a shape": (INT4, without("weight_shape"), "has no model.*weight_shape"),
    "int4, negative shape": (
        INT4,
        replaced("weight_shape", torch.tensor([64, -128])),
        r"weight_shape is \[64, -128\], which cannot be a shape",
    ),
    "int4, huge shape": (
        INT4,
        replaced("weight_shape", torch.tensor([64, 1 << 62])),
        "which does not hold .* codes of 4 bits",
    ),
    "int4, scales of one group": (
        INT4,
        replaced("weight_scale", torch.ones(64, 1)),
        r"weight_scale has the shape \[64, 1\], not \[64, 4\]",
    ),
    "int8 without zero points": (ASYMMETRIC, without("weight_zero_point"), "weight_zero_point"),
    "nvfp4, two factors": (
        NVFP4,
        replaced("weight_global_scale", torch.ones(2)),
        r"weight_global_scale has the shape \[2\], not \[1\]",
    ),
    "a tensor that the model lacks": (
        (AWQ, awq_parts),
        replaced("act_scales", torch.ones(64)),
        "has 1 tensor that LlamaForCausalLM lacks, .*: model.layers.0.mlp.down_proj.act_scales",
    ),
    "a layer that is missing": (
        (AWQ, awq_parts),
        lambda tensors: [tensors.pop(name) for name in [*tensors] if DOWN in name],
        "lacks 1 weight of LlamaForCausalLM: model.layers.0.mlp.down_proj.weight",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_a_sentence_with_the_tensor(name: str, tmp_path: Path) -> None:
    (settings, parts_of), damage, message = DAMAGED[name]
    if isinstance(parts_of, str):
        parts_of = compressed_parts(parts_of)
    place = quantized(tmp_path, settings, parts_of)
    rewrite(place, damage)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(place))
    is_about_values = "NaN" in message or "LlamaForCausalLM" in message
    assert is_about_values or str(tmp_path) in caught.value.message


CT = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "by bitsandbytes, which quantizer cannot dequantize",
        ),
        ({"quant_method": "hqq"}, "by hqq, which"),
        ({"bits": 4}, "by an unknown method, which"),
        (["gptq"], "quantization_config is not an object"),
        (
            {"quant_method": "gptq", "bits": 5},
            "bits of the quantization is 5, and .* 2, 3, 4, 8",
        ),
        ({"quant_method": "gptq"}, "bits of the quantization is null"),
        (gptq_settings(4, 0), "group_size of the quantization is 0"),
        (gptq_settings(4, 32, checkpoint_format="marlin"), 'checkpoint_format .* is "marlin"'),
        (AWQ | {"version": "gemv"}, 'version of the quantization is "gemv", .* reads "gemm"'),
        (AWQ | {"bits": 8}, "bits of the quantization is 8"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "two integers above zero"),
        ({"quant_method": "mxfp4"}, "has no such tensors"),
        (CT, "config_groups of the quantization is null"),
        (CT | {"config_groups": {"a": ["Linear"]}}, "config_groups.a of the quantization"),
        (CT | {"config_groups": {"a": {"weights": {}}}}, "targets of the quantization is null"),
        (
            CT | {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}},
            "is not a regular expression",
        ),
        (
            CT | {"config_groups": {"a": {"targets": [], "weights": {"num_bits": 16}}}},
            "num_bits of the quantization is 16",
        ),
        (CT | {"config_groups": {}}, "no group in config_groups has model.*_proj as a target"),
        (CT | {"sparsity_config": {"format": "marlin-24"}}, "sparsity_config.format"),
        (
            CT | {"transform_config": {"config_groups": {"R3": {}}}},
            "transforms values while it runs",
        ),
        (CT | {"quantization_status": "initialized"}, "quantization_status"),
    ],
)
def test_what_cannot_be_read_names_the_setting(
    settings: Any, message: str, tmp_path: Path
) -> None:
    def parts_of(weight: Tensor) -> Parts:
        return {"weight": torch.ones(weight.shape, dtype=torch.int8)}

    place = quantized(tmp_path, settings, parts_of)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(place))
    assert str(tmp_path) in caught.value.message
    assert "float model" in str(caught.value.help) or "saved with" in str(caught.value.help)
