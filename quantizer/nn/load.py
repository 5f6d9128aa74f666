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
from quantizer.nn.quantized_tensor import QuantizedTensor
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
            layer = modules[entry["module"]]
            assert isinstance(layer, Layer)  # the generated constructor made it
            layer.attach(role, quantizer_of(quantized_tensor(entry, role, groups), inplace=entry["inplace"]))
    for name, correction in biases.items():
        layer = modules[next(iter(info["tensors"][name].values()))["module"]]
        assert isinstance(layer, Layer)
        layer.correct_bias(correction)
    network.eval()


def quantized_tensor(entry: Mapping[str, Any], role: str, groups: Mapping[str, Tensor]) -> QuantizedTensor:
    """A tensor of quant_info.json; `groups` is GROUP_SCALES."""
    spec, name = QuantizationSpec(**entry["spec"]), f"{entry['module']}.{role}"
    if "scales_in" in entry:
        scale, zero_point = groups[f"{name}.scale"], groups.get(f"{name}.zero_point")
    elif "scale" in entry:
        scale, given = torch.tensor(entry["scale"], dtype=torch.float32), entry.get("zero_point")
        zero_point = None if given is None else torch.tensor(given, dtype=torch.int32)
    else:
        return QuantizedTensor(spec)
    return QuantizedTensor(
        spec, scale, torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
    )


def quantizer_of(tensor: QuantizedTensor, *, inplace: bool = False) -> TensorQuantizer:
    """The quantizer of a tensor; a dynamic one finds its scale itself."""
    known = () if tensor.spec.is_dynamic else (tensor.scale, tensor.zero_point)
    return TensorQuantizer(tensor.spec, *known, inplace=inplace)
