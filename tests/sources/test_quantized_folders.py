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
from support.llamas import llama, saved, tokens
from torch import Tensor

from quantizer.errors import ModelError
from quantizer.sources.hugging_face import load_hugging_face
from quantizer.sources.models import load_model
from quantizer.storage.deferred_tensor import DeferredTensor

Config = dict[str, Any]
Parts = dict[str, Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
DOWN = "model.layers.0.mlp.down_proj"
ATTENTION_OUTPUT = "model.layers.0.self_attn.o_proj"


def quantized(
    folder: Path, settings: Config, parts_of: Callable[[Tensor], Parts], **model: Any
) -> Path:
    """The folder of a LLaMA whose linear layers are stored as `parts_of` returns them."""
    saved(folder, llama(**SIZES | model).to(model.get("dtype")))
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
    place = quantized(
        tmp_path, compressed_settings(name), compressed_parts(name), dtype=dtype
    )
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
