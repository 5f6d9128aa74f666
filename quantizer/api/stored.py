"""A saved model's files, read and checked: in themselves, then against the model that is to take them up.

Changes nothing: what comes of it is complete, and only has to be put in its places.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.config.wording import a_kind
from quantizer.engine.module_attach import quantizer_of
from quantizer.errors import ResultError
from quantizer.graph.modules import as_planned, operator_of, parameters_of
from quantizer.nn.inplace import check_quantizable, lacks_bias
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.rescale import InputRotation, InputScale
from quantizer.numerics.codes import unpack
from quantizer.numerics.granularity import scale_shape
from quantizer.observers import code_range_of, kernel_of

FORMAT = 4
TENSORS, DESCRIPTION = "model.safetensors", "quantizer.json"
INSERTED: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "input_scale": (InputScale, ("axis",)),
    "rotation": (InputRotation, ()),
}
"""Class and constants of each operator that algorithms insert; a layer is made of the size of its weight and these."""
_AGAIN = "save the model again with ModelQuantizer.save"
_CHANGED = "checksum mismatch: the file changed after it was saved"


@dataclass(frozen=True)
class Stored:
    """The state of a quantized model: values by the names of its `state_dict`, quantizers by path and role.

    `ties` has the further names of a value, by each the first one; `inserted` the layers before a module, by its path;
    `biases` the paths of layers that get one.
    """

    values: Mapping[str, Tensor]
    quantizers: Mapping[tuple[str, str], TensorQuantizer]
    ties: Mapping[str, str]
    inserted: Mapping[str, tuple[nn.Module, ...]]
    biases: Sequence[str]


def read(folder: Path, model: nn.Module) -> Stored:
    """The state in `folder`, as `model` can take it up.

    Raises:
        ResultError: the files are missing or damaged, or are of another model.
        ModelError: a layer cannot be quantized in place.
    """
    described = _description(folder / DESCRIPTION)
    content = _content(folder / TENSORS)
    if hashlib.sha256(content).hexdigest() != described.get("tensors"):
        raise _damaged(folder / TENSORS, _CHANGED)
    tensors = parse_tensors(content)
    try:
        own = model.state_dict() | _new_biases(model, described, tensors)
        _check_names(set(own), described, tensors)
        _check_layers(model, described)
        quantizers = _quantizers(model, described, tensors)
        values = _values(model, own, described, tensors, quantizers)
        inserted = _inserted(model, described, tensors)
        return Stored(values, quantizers, described["ties"], inserted, described["biases"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _damaged(folder / DESCRIPTION, f"{type(error).__name__}: {error}") from error


def checksum(described: Mapping[str, Any]) -> str:
    """The sha256 of a description, but for its own entry."""
    rest = {key: value for key, value in described.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def aliases(model: nn.Module) -> dict[str, str]:
    """Each further path of a module, and its first one."""
    first: dict[int, str] = {}
    paths = model.named_modules(remove_duplicate=False)
    found = [(path, first.setdefault(id(module), path)) for path, module in paths]
    return {path: owner for path, owner in found if path != owner}


def joined(*parts: str) -> str:
    """A dotted path; the model itself is the empty one.

    >>> joined("", "weight"), joined("0", "weight")
    ('weight', '0.weight')
    """
    return ".".join(part for part in parts if part)


def inserted_layers(module: nn.Module) -> list[dict[str, Any]]:
    """What stands before a module: an operator and its constants each."""
    found = []
    for layer in module.get_submodule("input_layers").children() if "input_layers" in module._modules else ():
        op, keys = next((op, keys) for op, (cls, keys) in INSERTED.items() if isinstance(layer, cls))
        found.append({"op": op, "attrs": {key: getattr(layer, key) for key in keys}})
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ResultError(f"{path} does not exist", help="ModelQuantizer.save(model, folder) writes it") from None
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}") from error


def _description(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"not a readable JSON file: {error}") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ResultError(f"{path} is not of a model that this version saved", help=_AGAIN)
    if described.get("checksum") != checksum(described):
        raise _damaged(path, _CHANGED)
    return described


def _damaged(path: Path, reason: str) -> ResultError:
    return ResultError(f"{path} is damaged: {reason}", help=_AGAIN)


def _another(described: Mapping[str, Any], message: str) -> ResultError:
    return ResultError(message, help=f"load it into a float {described['model']} that is built like the saved one")


def _quantizer_names(described: Mapping[str, Any]) -> set[str]:
    """The state's names of scales and zero points."""
    layers = {**{path: path for path in described["layers"]}, **described["shared"]}
    return {
        joined(path, "quantizers", role, part)
        for path, owner in layers.items()
        for role in described["layers"][owner]["tensors"]
        for part in ("scale", "zero_point")
    }


def _inserted_names(described: Mapping[str, Any]) -> set[str]:
    """The state's names of the weights of inserted layers."""
    paths = {**{path: path for path in described["layers"]}, **described["shared"]}
    return {
        joined(path, "input_layers", str(number), "weight")
        for path, owner in paths.items()
        for number in range(len(described["inserted"].get(owner, ())))
    }


def _inserted(
    model: nn.Module, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[nn.Module, ...]]:
    """The layers before modules, with their weights."""
    found: dict[str, list[nn.Module]] = {}
    for path, number, row in (
        (path, *each) for path, rows in described["inserted"].items() for each in enumerate(rows)
    ):
        name = joined(path, "input_layers", str(number), "weight")
        weight = tensors[name]
        cls, keys = INSERTED[row["op"]]
        if weight.dim() != 1 or not weight.is_floating_point() or set(row["attrs"]) != set(keys):
            raise ValueError(f"{name} is no {row['op']}")
        layer = cls(len(weight), **row["attrs"])
        device = next((parameter.device for parameter in model.get_submodule(path).parameters()), weight.device)
        layer.weight = nn.Parameter(weight.to("cpu" if device.type == "meta" else device), requires_grad=False)
        found.setdefault(path, []).append(layer)
    return {path: tuple(layers) for path, layers in found.items()}


def _new_biases(model: nn.Module, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases that algorithms gave to layers without one, by the state's names."""
    modules = dict(model.named_modules())
    for path in described["biases"]:
        if path not in modules or not lacks_bias(modules[path]):
            raise _another(described, f"{path} is no layer without a bias, as it was when an algorithm gave it one")
    return {name: tensors[name] for name in (joined(path, "bias") for path in described["biases"])}


def _check_names(own: set[str], described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    stored = {*tensors, *described["ties"]} - _quantizer_names(described) - _inserted_names(described)
    for text, names in (("has no", stored - own), ("has a tensor that is not in the file:", own - stored)):
        if names:
            raise _another(described, f"the model {text} {min(names)}")


def _check_layers(model: nn.Module, described: Mapping[str, Any]) -> None:
    """Each quantized layer is of the same class and operator in the model, and is shared where it was shared."""
    modules, now, then = dict(model.named_modules(remove_duplicate=False)), aliases(model), described["shared"]
    for path in (*described["layers"], *then):
        if now.get(path, path) != then.get(path, path):
            one, other = (path, then[path]) if path in then else (now[path], path)
            places = ("file", "model") if path in then else ("model", "file")
            raise _another(
                described, f"{one} and {other} are one layer in the {places[0]} and are not in the {places[1]}"
            )
    for path, layer in described["layers"].items():
        module, where = modules[path], path or "the model"
        check_quantizable(module, where, layer["tensors"])
        if (layer["class"], layer["operator"]) != (type(module).__name__, operator_of(module)):
            raise _another(described, f"{where} is a {layer['class']} in the file and {a_kind(module)} in the model")


def _quantizers(
    model: nn.Module, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[tuple[str, str], TensorQuantizer]:
    """By path and role; scales are what a quantizer can work with.

    Raises KeyError, TypeError or ValueError for what `save` does not write.
    """
    made = {}
    for path, layer in described["layers"].items():
        module = model.get_submodule(path)
        known = {"input", "activation", *map(parameter_role, parameters_of(module))}
        for role, words in layer["tensors"].items():
            if role not in known:
                raise ValueError(f"{path or 'the model'} has no tensor {role!r}")
            spec = QuantizationSpec(**words)
            kernel_of(spec)
            nothing = torch.empty(0)
            names = [joined(path, "quantizers", role, part) for part in ("scale", "zero_point")]
            scale, zero_point = (tensors.get(described["ties"].get(name, name), nothing) for name in names)
            if spec.is_scaled and not spec.is_dynamic:
                code_range_of(spec)
                _check_scale(names[0], scale, zero_point, _scale_shape(module, role, spec))
            made[path, role] = quantizer_of(module, role, QuantizedTensor(spec, scale, zero_point))
    return made


def _scale_shape(module: nn.Module, role: str, spec: QuantizationSpec) -> tuple[int, ...] | None:
    """None where it cannot be known: the channels of an activation."""
    if not is_parameter(role):
        return () if spec.qscheme == "per_tensor" else None
    parameter = module.get_parameter(parameters_of(module)[parameter_name(role)])
    shape = as_planned(module, parameter_name(role), parameter).shape
    return scale_shape(tuple(shape), spec.qscheme, spec.ch_axis, spec.group_size)


def _check_scale(name: str, scale: Tensor, zero_point: Tensor, shape: tuple[int, ...] | None) -> None:
    if not scale.numel() or scale.shape != zero_point.shape or (shape is not None and scale.shape != shape):
        raise ValueError(f"{name} is of another shape than its tensor needs")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{name} is not finite and positive")


def _values(
    model: nn.Module,
    own: Mapping[str, Tensor],
    described: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    quantizers: Mapping[tuple[str, str], TensorQuantizer],
) -> dict[str, Tensor]:
    """The model's own tensors, of the names, kinds and shapes in `own`, those that were stored as codes decoded."""
    ours = _quantizer_names(described) | _inserted_names(described)
    coded = described["codes"]
    values = {}
    for name in sorted(tensors.keys() - ours):
        value = tensors[name]
        if name in coded:
            row = coded[name]
            module, key = model.get_submodule(row["layer"]), parameter_name(row["role"])
            tensor = quantizers[row["layer"], row["role"]].tensor
            codes = unpack(value, tensor.spec, row["shape"])
            found = replace(tensor, codes=codes, dtype=getattr(torch, row["dtype"]))
            value = as_planned(module, key, found.decoded()).contiguous()
        if value.is_floating_point() != own[name].is_floating_point():
            raise ValueError(f"{name} is {value.dtype} in the file and {own[name].dtype} in the model")
        if value.shape != own[name].shape:
            raise _another(
                described, f"{name} is {list(value.shape)} in the file and {list(own[name].shape)} in the model"
            )
        values[name] = value
    return values
