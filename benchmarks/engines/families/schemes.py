"""The schemes that families are tried with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[3] / "configs"
EMBEDDING = "kind:embedding"
_GROUPS = {"qscheme": "per_group", "ch_axis": 1, "group_size": 32}
_ROWS = {"qscheme": "per_channel", "ch_axis": 0}
_TOKENS = {"qscheme": "per_token", "is_dynamic": True}
_INT4 = {"dtype": "int4", **_GROUPS}
_INT8 = {"dtype": "int8", **_ROWS}
_DYNAMIC_INT8 = {"dtype": "int8", "symmetric": False, **_TOKENS}
_STATIC_INT8 = {"dtype": "int8", "symmetric": True, "qscheme": "per_tensor"}
_FP8 = {"dtype": "fp8_e4m3", **_ROWS}
_NVFP4 = {"dtype": "fp4", "ch_axis": 1, "scale_format": "e4m3"}
_MXFP4 = {"dtype": "mx", "mx_element_dtype": "fp4", "ch_axis": 1}


@dataclass(frozen=True)
class Scheme:
    """How weights and inputs are quantized, and the target that holds it.

    Attributes:
        title: what tables call it.
        weight: the specification of weights; empty if nothing is quantized.
        input: that of inputs; empty if they stay float.
        target: of `--to`.
        dtype: of the model, by its name in torch.
        exclude: the layers that stay float.
        layers: other specifications for some layers.
        preset: the name of a config that says all of this instead.
    """

    title: str
    weight: Mapping[str, Any] = field(default_factory=dict)
    input: Mapping[str, Any] = field(default_factory=dict)
    target: str = "compressed-tensors"
    dtype: str = "float32"
    exclude: tuple[str, ...] = (EMBEDDING, "kind:head")
    layers: Mapping[str, Any] = field(default_factory=dict)
    preset: str = ""

    @property
    def is_float(self) -> bool:
        """Return whether nothing is quantized."""
        return not self.weight and not self.preset

    @property
    def config(self) -> dict[str, Any]:
        """Return a config in the hierarchical form."""
        if self.preset:
            path = CONFIGS / f"{self.preset}.json"
            preset: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return preset
        level: dict[str, Any] = {"weight": dict(self.weight), "target_device": "CPU"}
        if self.input:
            level["input_tensors"] = dict(self.input)
        return {
            "global_quant_config": level,
            "layer_quant_config": dict(self.layers),
            "exclude": list(self.exclude),
        }


SCHEMES = {
    "w4": Scheme("int4 in groups", _INT4),
    "w8": Scheme("int8", _INT8),
    "w8a8_dynamic": Scheme("int8, dynamic inputs", _INT8, _DYNAMIC_INT8),
    "w8a8_static": Scheme("int8, static inputs", _INT8, _STATIC_INT8),
    "fp8": Scheme("fp8, dynamic inputs", _FP8, {"dtype": "fp8_e4m3", **_TOKENS}),
    "nvfp4": Scheme("NVFP4", _NVFP4, dtype="bfloat16"),
    "mxfp4": Scheme("MXFP4", _MXFP4, dtype="bfloat16"),
    "gptq": Scheme("GPTQ's form", _INT4, target="gptq"),
    "q8_0": Scheme("GGUF, Q8_0", target="gguf", preset="gguf_q8_0"),
    "q4_0": Scheme("GGUF, Q4_0", target="gguf", preset="gguf_q4_0"),
    "float_16": Scheme("float, bfloat16", dtype="bfloat16"),
    "w4_16": Scheme("int4 in groups, bfloat16", _INT4, dtype="bfloat16"),
    "mixed_16": Scheme(
        "int4 and int8, bfloat16",
        _INT4,
        dtype="bfloat16",
        layers={"*.down_proj": {"weight": _INT8, "input_tensors": _DYNAMIC_INT8}},
    ),
    "widths_16": Scheme(
        "int4 and int8 in groups, bfloat16",
        _INT4,
        dtype="bfloat16",
        layers={"*.down_proj": {"weight": {"dtype": "int8", **_GROUPS}}},
    ),
    "head_16": Scheme(
        "int4, head too, bfloat16", _INT4, dtype="bfloat16", exclude=(EMBEDDING,)
    ),
}
"""Names that end with `_16` are those of models in bfloat16, for engines without float32."""
