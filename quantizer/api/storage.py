"""A quantized model's state in a folder: integer codes in model.safetensors, what they mean in
quantizer.json.

Holds data only, no code: a float model of the same architecture takes it up.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.api.config import path_of
from quantizer.api.stored import (
    DESCRIPTION,
    FORMAT,
    INSERTED,
    TENSORS,
    checksum,
    further_names,
    joined,
    read,
)
from quantizer.calibration.module_attach import put
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import a_kind
from quantizer.errors import ModelError
from quantizer.graph.modules import as_planned, operator_of, parameters_of
from quantizer.nn.inplace import (
    InPlace,
    add_bias,
    check_float,
    insert_before,
    keep_layers_called,
    rectify_output,
)
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.transaction import all_or_nothing
from quantizer.numerics.codes import pack
from quantizer.results.result_set import locked, replaced_set
from quantizer.storage.files import write_json, write_tensors


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write `model.safetensors` and `quantizer.json`; what is there stays until both are
    written.

    The tensors are those of `model.state_dict()`, a tied one once; a quantized parameter is
    stored as its codes, those of fewer than 8 bits packed (`numerics.codes.pack`). The JSON has
    `layers`, class, operator and the spec of each tensor by path and role; `shared`, the
    further paths of these layers; `codes`, shape and dtype of each parameter stored as codes;
    `ties`, the further names of a tensor; `biases`, the layers that an algorithm gave one;
    `rectified`, those that quantize their output after a ReLU; and checksums.

    Raises:
        ModelError: the model is not quantized, or has state that is no tensor.
        ResultError: the folder cannot be written.
        UsageError: `folder` is no path.
    """
    place = path_of(folder, "folder")
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {a_kind(model)}, not a torch.nn.Module")
    layers = {
        path: module for path, module in model.named_modules() if isinstance(module, InPlace)
    }
    if not layers:
        raise ModelError(
            "the model has no quantized layer",
            help="call ModelQuantizer(config).quantize_model first",
        )
    state = model.state_dict()
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise ModelError(f"{strange[0]} is state that is no tensor, so it cannot be written")
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    ties = further_names(each for each in named if each[0] in state)
    shared = further_names(model.named_modules(remove_duplicate=False))
    codes = _encode(layers, state, ties)
    kept = {name: value for name, value in state.items() if name not in ties}
    described = {
        "format": FORMAT,
        "model": type(model).__name__,
        "layers": {
            path: {
                "class": type(layer).__name__,
                "operator": operator_of(layer),
                "tensors": {
                    role: quantizer.spec.to_json() for role, quantizer in _quantizers(layer)
                },
            }
            for path, layer in layers.items()
        },
        "shared": {path: owner for path, owner in shared.items() if owner in layers},
        "codes": codes,
        "ties": ties,
        "biases": [
            path for path, module in model.named_modules() if "has_added_bias" in vars(module)
        ],
        "rectified": [path for path, module in layers.items() if module.rectifies_output],
        "inserted": {
            path: inserted for path, module in layers.items() if (inserted := _inserted(module))
        },
    }
    with locked(place), replaced_set(place) as new:
        described["tensors"] = write_tensors(new / TENSORS, kept)
        write_json(new / DESCRIPTION, described | {"checksum": checksum(described)})


def load(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Give a float model the state of a saved one, in place; its weights may be of any value,
    or on the meta device.

    Raises:
        ModelError: `model` is no float module.
        ResultError: the files are missing or damaged, or are of another model.
        UsageError: `folder` is no path. The model is as it was after all of these.
    """
    place = path_of(folder, "folder")
    check_float(model)
    stored = read(place)
    modules = dict(model.named_modules(remove_duplicate=False))
    with all_or_nothing(model):
        with stored.telling_damage():
            stored.check(model)
            for path in stored.described["biases"]:
                add_bias(modules[path], torch.zeros(stored.shape(joined(path, "bias"))))
            quantized = stored.quantized(model)
            values, inserted = stored.values(model, quantized), stored.inserted(model)
        for path, layer in inserted:
            insert_before(modules[path], path, layer)
        for name, tensor in values.items():
            _set(modules, name, tensor)
        for name, owner in stored.described["ties"].items():
            if owner in values:
                (path, _, attribute), (holder, _, original) = (
                    name.rpartition("."),
                    owner.rpartition("."),
                )
                setattr(modules[path], attribute, getattr(modules[holder], original))
        for (path, role), own in quantized.items():
            put(modules[path], path, role, own)
        for path in stored.described["rectified"]:
            rectify_output(modules[path])
        keep_layers_called(model)


def _inserted(module: InPlace) -> list[dict[str, Any]]:
    """What stands before a module: an operator and its constants each."""
    found = []
    for layer in (
        module.get_submodule("input_layers").children()
        if "input_layers" in module._modules
        else ()
    ):
        op, keys = next(
            (op, keys) for op, (cls, keys) in INSERTED.items() if isinstance(layer, cls)
        )
        found.append({"op": op, "attrs": {key: getattr(layer, key) for key in keys}})
    return found


def _encode(
    layers: dict[str, InPlace], state: dict[str, Tensor], ties: dict[str, str]
) -> dict[str, Any]:
    """Put codes in the places of quantized parameters in `state`, and say what is what."""
    codes: dict[str, Any] = {}
    for path, module in layers.items():
        for role, quantizer in _quantizers(module):
            key = parameter_name(role)
            name = joined(path, parameters_of(module)[key]) if is_parameter(role) else None
            if name is None or name in ties:
                continue
            value = as_planned(module, key, state[name])
            found = quantizer.tensor.encoded(value)
            if found.codes is not None:
                state[name] = pack(found.codes, found.spec)
                dtype = str(value.dtype).removeprefix("torch.")
                codes[name] = {
                    "layer": path,
                    "role": role,
                    "shape": list(value.shape),
                    "dtype": dtype,
                }
    return codes


def _quantizers(module: InPlace) -> Iterator[tuple[str, TensorQuantizer]]:
    return (
        (role, child)
        for role, child in module.quantizers.items()
        if isinstance(child, TensorQuantizer)
    )


def _set(modules: dict[str, nn.Module], name: str, tensor: Tensor) -> None:
    """Put a tensor into its module, on the device that the old one is on."""
    path, _, attribute = name.rpartition(".")
    module = modules[path]
    old = getattr(module, attribute)
    value = tensor.to("cpu" if old.is_meta else old.device)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(
            value, requires_grad=old.requires_grad and value.is_floating_point()
        )
    setattr(module, attribute, value)
