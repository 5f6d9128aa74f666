"""Fills a generated network from weights.safetensors and quant_info.json beside it. Reads data, never code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.errors import ResultError
from quantizer.nn.layer import Layer
from quantizer.nn.quantizer import TensorQuantizer

GROUP_SCALES = "qparams.safetensors"
"""The file with scales and zero points of groups, by `<module>.<role>.scale` and `.zero_point`."""


def load(network: nn.Module, file: str) -> None:
    """Give a generated network its parameters and quantizers, as test mode runs it.

    Raises:
        ResultError: the folder of `file` has no calibration.
    """
    folder = Path(file).parent
    try:
        info = json.loads((folder / "quant_info.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "weights.safetensors")
        corrections = "bias_corr.safetensors" in info["header"]["files"]
        biases = load_file(folder / "bias_corr.safetensors") if corrections else {}
        groups = load_file(folder / GROUP_SCALES) if GROUP_SCALES in info["header"]["files"] else {}
    except FileNotFoundError as error:
        raise ResultError(f"{error.filename or folder} does not exist", help="run --quant_mode calib first") from None
    modules = dict(network.named_children())
    for key, tensor in weights.items():
        name, _, attribute = key.partition(".")
        module = modules[name]
        if attribute in module._buffers:
            module.register_buffer(attribute, tensor)
        else:
            module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
    for roles in info["tensors"].values():
        for role, entry in roles.items():
            scale, zero_point = qparams_of(entry, role, groups)
            layer = modules[entry["module"]]
            assert isinstance(layer, Layer)  # the generated constructor made it
            spec = QuantizationSpec(**entry["spec"])
            layer.attach(role, quantizer_of(spec, scale, zero_point, inplace=entry["inplace"]))
    for name, correction in biases.items():
        layer = modules[next(iter(info["tensors"][name].values()))["module"]]
        assert isinstance(layer, Layer)
        layer.correct_bias(correction)
    network.eval()


def qparams_of(entry: Mapping[str, Any], role: str, groups: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a tensor of quant_info.json; 1 and 0 where it has none. `groups` is GROUP_SCALES."""
    if "scales_in" in entry:
        name = f"{entry['module']}.{role}"
        scale = groups[f"{name}.scale"]
        return scale, groups.get(f"{name}.zero_point", torch.zeros_like(scale, dtype=torch.int32))
    scale = torch.tensor(entry.get("scale", 1.0), dtype=torch.float32)
    zero_point = entry.get("zero_point")
    return scale, torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else torch.tensor(
        zero_point, dtype=torch.int32
    )


def quantizer_of(
    spec: QuantizationSpec, scale: Tensor, zero_point: Tensor, *, inplace: bool = False
) -> TensorQuantizer:
    """The quantizer of a tensor; a dynamic one finds its scale itself."""
    return TensorQuantizer(spec, *(() if spec.is_dynamic else (scale, zero_point)), inplace=inplace)
