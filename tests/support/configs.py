"""Config files for tests, written to disk so that places in them are real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantizer.config.load import load_config
from quantizer.config.model import ResolvedConfig

OVERALL: dict[str, Any] = {
    "bit_width": 8,
    "method": "maxmin",
    "round_mode": "half_even",
    "symmetry": True,
    "per_channel": False,
    "signed": True,
    "narrow_range": False,
    "scale_type": "float",
    "calib_statistic_method": "max",
}
ROLES = ["input", "weights", "bias", "activation"]
SETTINGS: dict[str, Any] = {
    "convert_relu6_to_relu": False,
    "include_cle": False,
    "keep_first_last_layer_accuracy": False,
    "keep_add_layer_accuracy": False,
    "include_bias_corr": False,
    "target_device": "CPU",
    "quantizable_data_type": ROLES,
}


def layer(
    name: str | None = None,
    *,
    type: str | None = None,  # noqa: A002 - the file's word is layer_type
    roles: list[str] | None = None,
    tensor: dict[str, Any] | None = None,
    required: bool = True,
    **overall: Any,
) -> dict[str, Any]:
    """An entry of layer_quantize_config."""
    entry: dict[str, Any] = {
        "layer_type": type,
        "layer_name": name,
        "quantizable_data_type": ["weights", "bias", "activation"] if roles is None else roles,
        "overall_quantize_config": OVERALL | overall,
        "tensor_quantize_config": tensor or {},
    }
    return entry if required else entry | {"required": False}


def document(
    *layers: dict[str, Any],
    tensor: dict[str, Any] | None = None,
    overall: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A complete file in the layered form."""
    return {
        **SETTINGS,
        **settings,
        "overall_quantize_config": OVERALL | (overall or {}),
        "tensor_quantize_config": tensor or {},
        "layer_quantize_config": list(layers),
    }


def config(folder: Path, content: dict[str, Any]) -> ResolvedConfig:
    """The file's config; it must be free of errors."""
    path = folder / "config.json"
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return load_config(path).require()
