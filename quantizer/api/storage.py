"""A quantized model's state in a folder: integer codes in model.safetensors, what they mean in quantizer.json.

Holds data only, no code: a float model of the same architecture takes it up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.api.attach import put, quantizer_of
from quantizer.api.codes import decode, encode
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.engine.files import read_json, read_tensors, write_json, write_tensors
from quantizer.errors import ModelError, ResultError
from quantizer.graph.modules import as_planned, parameters_of
from quantizer.nn.inplace import InPlace, keep_layers_called
from quantizer.nn.quantizer import TensorQuantizer

FORMAT = 1
TENSORS, DESCRIPTION = "model.safetensors", "quantizer.json"
_QUANTIZERS = ".quantizers."


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write `model.safetensors` and `quantizer.json`.

    The tensors are those of `model.state_dict()`, a tied one once; a quantized parameter is stored as its codes, in one
    byte or in the smallest integer dtype that holds them, two to a byte up to 4 bits. The JSON has `layers`, the spec
    of each quantized tensor by path and role, `codes`, shape and dtype of each parameter stored as codes, and `ties`.

    Raises:
        ModelError: the model is not quantized, or has state that is no tensor.
        ResultError: the folder cannot be written.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, InPlace)}
    if not layers:
        raise ModelError("the model has no quantized layer", help="call ModelQuantizer(config).quantize_model first")
    state, ties = model.state_dict(), _ties(model)
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise ModelError(f"{strange[0]} is state that is no tensor, so it cannot be written")
    codes: dict[str, Any] = {}
    for path, module in layers.items():
        for role, quantizer in quantizers_of(module).items():
            name = _parameter_path(path, module, role)
            if name is None or ties.get(name, name) in codes:
                continue
            value = as_planned(module, parameter_name(role), state[name])
            stored, is_codes = encode(value, quantizer)
            if is_codes:
                owner = ties.get(name, name)
                state[owner] = stored
                codes[owner] = {"layer": path, "role": role, "shape": list(value.shape), "dtype": _word(value.dtype)}
    described = {
        "format": FORMAT,
        "model": type(model).__name__,
        "layers": {
            path: {role: quantizer.spec.to_json() for role, quantizer in quantizers_of(module).items()}
            for path, module in layers.items()
        },
        "codes": codes,
        "ties": ties,
    }
    write_tensors(Path(folder) / TENSORS, {name: value for name, value in state.items() if name not in ties})
    write_json(Path(folder) / DESCRIPTION, described)


def load(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give a float model the state of a saved one, in place; its weights may be of any value, or on the meta device.

    Raises:
        ResultError: the files are missing or damaged, or are of another model; the model is then as it was.
    """
    described = read_json(Path(folder) / DESCRIPTION)
    tensors = read_tensors(Path(folder) / TENSORS)
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ResultError(f"{Path(folder) / DESCRIPTION} is not of a model that this version saved")
    modules = dict(model.named_modules())
    _check_fit(model, modules, described, tensors)
    quantizers = {
        (path, role): _quantizer(modules[path], path, role, QuantizationSpec(**spec), tensors)
        for path, roles in described["layers"].items()
        for role, spec in roles.items()
    }
    for name, row in described["codes"].items():
        value = decode(tensors[name], quantizers[row["layer"], row["role"]], row["shape"], getattr(torch, row["dtype"]))
        tensors[name] = as_planned(modules[row["layer"]], parameter_name(row["role"]), value).contiguous()
    for name, tensor in tensors.items():
        if _QUANTIZERS not in name:
            _set(modules, name, tensor)
    for name, owner in described["ties"].items():
        path, _, attribute = name.rpartition(".")
        holder, _, original = owner.rpartition(".")
        setattr(modules[path], attribute, getattr(modules[holder], original))
    for (path, role), quantizer in quantizers.items():
        put(modules[path], path, role, quantizer)
    keep_layers_called(model)


def quantizers_of(module: InPlace) -> dict[str, TensorQuantizer]:
    """A layer's quantizers by role."""
    return {role: child for role, child in module.quantizers.items() if isinstance(child, TensorQuantizer)}


def _ties(model: nn.Module) -> dict[str, str]:
    """Each further path of a parameter, and its first one."""
    first: dict[int, str] = {}
    paths = model.named_parameters(remove_duplicate=False)
    found = [(path, first.setdefault(id(parameter), path)) for path, parameter in paths]
    return {path: owner for path, owner in found if path != owner}


def _parameter_path(path: str, module: nn.Module, role: str) -> str | None:
    """The state's name for the parameter in a role; None for activations."""
    if not is_parameter(role):
        return None
    attribute = parameters_of(module)[parameter_name(role)]
    return f"{path}.{attribute}" if path else attribute


def _quantizer(
    module: nn.Module, path: str, role: str, spec: QuantizationSpec, tensors: dict[str, Tensor]
) -> TensorQuantizer:
    prefix = f"{path}{_QUANTIZERS}" if path else _QUANTIZERS.removeprefix(".")
    nothing = torch.empty(0)
    scale, zero_point = (tensors.get(f"{prefix}{role}.{part}", nothing) for part in ("scale", "zero_point"))
    return quantizer_of(module, role, spec, scale, zero_point)


def _check_fit(
    model: nn.Module, modules: dict[str, nn.Module], described: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    own = model.state_dict()
    stored = {name for name in (*tensors, *described["ties"]) if _QUANTIZERS not in f".{name}"}
    for text, names in (
        ("has no", stored - own.keys()),
        ("has a tensor that is not in the file:", own.keys() - stored),
    ):
        if names:
            raise ResultError(
                f"the model {text} {min(names)}",
                help=f"load it into a float {described['model']} of the same sizes",
            )
    for name in sorted(stored & tensors.keys()):
        row = described["codes"].get(name)
        shape = tensors[name].shape if row is None else _shape_in_model(modules, row)
        if shape != own[name].shape:
            raise ResultError(f"{name} is {list(shape)} in the file and {list(own[name].shape)} in the model")


def _shape_in_model(modules: dict[str, nn.Module], row: dict[str, Any]) -> torch.Size:
    """The shape of a parameter that is stored as codes."""
    blank = torch.empty(row["shape"], device="meta")
    return as_planned(modules[row["layer"]], parameter_name(row["role"]), blank).shape


def _set(modules: dict[str, nn.Module], name: str, tensor: Tensor) -> None:
    """Put a tensor into its module, on the device that the old one is on."""
    path, _, attribute = name.rpartition(".")
    module = modules[path]
    old = getattr(module, attribute)
    device = "cpu" if old.is_meta else old.device
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(tensor.to(device), requires_grad=old.requires_grad and tensor.is_floating_point())
        setattr(module, attribute, value)
    else:
        module._buffers[attribute] = tensor.to(device)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
