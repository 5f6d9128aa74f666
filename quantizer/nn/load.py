"""Fills a generated network from weights.safetensors and quant_info.json beside it. Reads data, never code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from quantizer.config.model import QuantizationSpec
from quantizer.errors import ResultError
from quantizer.nn.layer import Layer
from quantizer.nn.quantizer import TensorQuantizer


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
            scale = torch.tensor(entry["scale"], dtype=torch.float32)
            zero_point = torch.tensor(entry["zero_point"], dtype=torch.int32)
            quantizer = TensorQuantizer(QuantizationSpec(**entry["spec"]), scale, zero_point, inplace=entry["inplace"])
            layer = modules[entry["module"]]
            assert isinstance(layer, Layer)  # the generated constructor made it
            layer.attach(role, quantizer)
    for name, correction in biases.items():
        layer = modules[next(iter(info["tensors"][name].values()))["module"]]
        assert isinstance(layer, Layer)
        layer.correct_bias(correction)
    network.eval()
