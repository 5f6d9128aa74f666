"""A saved model's files, read and checked: in themselves, then against the model that is to
take them up.

Changes nothing: what comes of it is complete, and only has to be put in its places.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name, parameter_role
from quantizer.config.typed_fields import fits
from quantizer.config.wording import a_kind
from quantizer.errors import ResultError
from quantizer.graph.modules import as_planned, as_stored, operator_of, parameters_of
from quantizer.nn.inplace import check_quantizable, lacks_bias
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.rescale import InputRotation, InputScale
from quantizer.numerics.codes import unpack
from quantizer.numerics.granularity import scale_shape
from quantizer.observers import axis_of, code_range_of, kernel_of
from quantizer.results.validation import spec_fault
from quantizer.storage.opened_files import OpenFile, SetKind, json_digest, open_files

FORMAT = 5
TENSORS, DESCRIPTION = "model.safetensors", "quantizer.json"
INSERTED: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "input_scale": (InputScale, ("axis",)),
    "rotation": (InputRotation, ()),
}
"""Class and constants of each operator that algorithms insert; a layer is made of the size of
its weight and these.
"""
DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)
"""What comes of values that `save` does not write."""
_AGAIN = "save the model again with ModelQuantizer.save"
_CHANGED = "checksum mismatch: the file changed after it was saved"
_KIND = SetKind(
    DESCRIPTION,
    changed=f"is damaged: {_CHANGED}",
    missing="ModelQuantizer.save(model, folder) writes it",
    again=_AGAIN,
)

Quantized = Mapping[tuple[str, str], QuantizedTensor]
"""By path and role."""


@dataclass(frozen=True)
class Stored:
    """A saved model: quantizer.json and the tensors of model.safetensors, by the names of the
    model's `state_dict`.
    """

    path: Path
    described: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @contextmanager
    def telling_damage(self) -> Iterator[None]:
        """What `save` does not write is an error about the file, whatever it leads to."""
        try:
            yield
        except DAMAGE as error:
            raise _damaged(self.path, f"{type(error).__name__}: {error}") from error

    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot take up this state.

        Raises:
            ResultError: it is another one than the saved.
            ModelError: a layer cannot be quantized in place.
        """
        modules = dict(model.named_modules())
        for path in self.described["biases"]:
            if path not in modules or not lacks_bias(modules[path]):
                raise self._another(
                    f"{path} is no layer without a bias, as it was when an algorithm gave it "
                    "one"
                )
        own = {
            *model.state_dict(),
            *(joined(path, "bias") for path in self.described["biases"]),
        }
        stored = {
            name
            for name in (*self.tensors, *self.described["ties"])
            if not name.startswith(self._ours)
        }
        for text, names in (
            ("has no", stored - own),
            ("has a tensor that is not in the file:", own - stored),
        ):
            if names:
                raise self._another(f"the model {text} {min(names)}")
        self._check_shared(further_names(model.named_modules(remove_duplicate=False)))
        for path, layer in self.described["layers"].items():
            module, where = modules[path], path or "the model"
            check_quantizable(module, where, layer["tensors"])
            if (layer["class"], layer["operator"]) != (
                type(module).__name__,
                operator_of(module),
            ):
                raise self._another(
                    f"{where} is a {layer['class']} in the file and {a_kind(module)} in the "
                    "model"
                )

    def _check_shared(self, now: Mapping[str, str]) -> None:
        """Each quantized layer is shared in the model where it was shared."""
        then = self.described["shared"]
        for path in (*self.described["layers"], *then):
            if now.get(path, path) != then.get(path, path):
                one, other = (path, then[path]) if path in then else (now[path], path)
                places = ("file", "model") if path in then else ("model", "file")
                raise self._another(
                    f"{one} and {other} are one layer in the {places[0]} and are not in the "
                    f"{places[1]}"
                )

    def quantized(self, model: nn.Module) -> Quantized:
        """How the layers' tensors are quantized, but for their codes; scales are what a
        quantizer can work with.
        """
        made = {}
        rectified = self.described["rectified"]
        if strange := [
            path
            for path in rectified
            if "activation" not in self.described["layers"][path]["tensors"]
        ]:
            raise ValueError(
                f"the output of {strange[0]} is not quantized, so no ReLU comes before that"
            )
        for path, layer in self.described["layers"].items():
            module = model.get_submodule(path)
            known = {"input", "activation", *map(parameter_role, parameters_of(module))}
            for role, words in layer["tensors"].items():
                if role not in known:
                    raise ValueError(f"{path or 'the model'} has no tensor {role!r}")
                if why := spec_fault(words, role):
                    raise ValueError(f"{role} of {path or 'the model'}: {why}")
                spec = QuantizationSpec(**words)
                kernel_of(spec), axis_of(spec)
                names = [
                    joined(path, "quantizers", role, part) for part in ("scale", "zero_point")
                ]
                ties, nothing = self.described["ties"], torch.empty(0)
                scale, zero_point = (
                    self.tensors.get(ties.get(name, name), nothing) for name in names
                )
                if spec.is_scaled and not spec.is_dynamic:
                    code_range_of(spec)
                    _check_scale(names[0], scale, zero_point, _scale_shape(module, role, spec))
                made[path, role] = QuantizedTensor(spec, scale, zero_point)
        return made

    def values(self, model: nn.Module, quantized: Quantized) -> dict[str, Tensor]:
        """The model's own tensors, of its names, kinds and shapes, those that were stored as
        codes decoded.
        """
        own, values = model.state_dict(), dict[str, Tensor]()
        learned, kinds = (
            {name for name, _ in model.named_parameters()},
            dict[torch.dtype, torch.dtype](),
        )
        for name in sorted(name for name in self.tensors if not name.startswith(self._ours)):
            value = self.tensors[name]
            if row := self.described["codes"].get(name):
                tensor = quantized[row["layer"], row["role"]]
                codes = unpack(value, tensor.spec, row["shape"])
                decoded = replace(
                    tensor, codes=codes, dtype=getattr(torch, row["dtype"])
                ).decoded()
                module = model.get_submodule(row["layer"])
                value = as_stored(module, parameter_name(row["role"]), decoded).contiguous()
            wanted = own[name]
            if value.is_floating_point() != wanted.is_floating_point():
                raise ValueError(
                    f"{name} is {value.dtype} in the file and {wanted.dtype} in the model"
                )
            if value.shape != wanted.shape:
                raise self._another(
                    f"{name} is {list(value.shape)} in the file and {list(wanted.shape)} in "
                    "the model"
                )
            if value.is_floating_point() and bool(
                (~value.isfinite() if name in learned else value.isnan()).any()
            ):
                raise ValueError(f"{name} holds NaN or infinity")
            if value.dtype != kinds.setdefault(wanted.dtype, value.dtype):
                raise ValueError(
                    f"{name} is {value.dtype}, and others like it are {kinds[wanted.dtype]}"
                )
            values[name] = value
        return values

    def shape(self, name: str) -> list[int]:
        """Of a parameter, however it is stored."""
        coded = self.described["codes"].get(name)
        return list(coded["shape"] if coded else self.tensors[name].shape)

    def inserted(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Path of a module and a layer that stands before it, with its weight."""
        found = []
        rows = [
            (path, *each)
            for path, own in self.described["inserted"].items()
            for each in enumerate(own)
        ]
        for path, number, row in rows:
            name = joined(path, "input_layers", str(number), "weight")
            weight = self.tensors[name]
            cls, keys = INSERTED[row["op"]]
            is_sound = (
                weight.dim() == 1
                and weight.is_floating_point()
                and bool(weight.isfinite().all())
            )
            if (
                not is_sound
                or set(row["attrs"]) != set(keys)
                or not all(fits(at, int) for at in row["attrs"].values())
            ):
                raise ValueError(f"{name} is no {row['op']}")
            layer = cls(len(weight), **row["attrs"])
            device = next(
                (parameter.device for parameter in model.get_submodule(path).parameters()),
                weight.device,
            )
            layer.weight = nn.Parameter(
                weight.to("cpu" if device.type == "meta" else device), requires_grad=False
            )
            found.append((path, layer))
        return found

    @cached_property
    def _ours(self) -> tuple[str, ...]:
        """How names of scales, of zero points and of the weights of inserted layers begin."""
        paths = (*self.described["layers"], *self.described["shared"])
        return tuple(
            f"{joined(path, part)}."
            for path in paths
            for part in ("quantizers", "input_layers")
        )

    def _another(self, message: str) -> ResultError:
        help_ = (
            f"load it into a float {self.described['model']} that is built like the saved one"
        )
        return ResultError(message, help=help_)


def read(folder: Path) -> Stored:
    """The files in `folder`; both are opened before one is read.

    Raises:
        ResultError: they are missing or damaged.
    """
    opened = open_files(folder, _KIND, lambda index: {TENSORS: _described(index)["tensors"]})
    index, tensors = opened[DESCRIPTION], opened[TENSORS]
    try:
        return Stored(index.path, _described(index), parse_tensors(tensors.content()))
    except ResultError:
        raise
    except Exception as error:  # of whatever class the parser has
        raise _damaged(tensors.path, f"not a readable safetensors file: {error}") from error


def _described(file: OpenFile) -> dict[str, Any]:
    """The content of quantizer.json.

    Raises:
        ResultError: `save` did not write it.
    """
    try:
        described = json.loads(file.content())
    except (ValueError, RecursionError) as error:
        raise _damaged(file.path, f"not a readable JSON file: {error}") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ResultError(f"{file.path} is not of a model that this version saved", help=_AGAIN)
    if described.get("checksum") != checksum(described) or not isinstance(
        described.get("tensors"), str
    ):
        raise _damaged(file.path, _CHANGED)
    return described


def checksum(described: Mapping[str, Any]) -> str:
    """The sha256 of a description, but for its own entry."""
    return json_digest({key: value for key, value in described.items() if key != "checksum"})


def further_names(named: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Each further name of an object, and its first one."""
    first: dict[int, str] = {}
    found = [(name, first.setdefault(id(value), name)) for name, value in named]
    return {name: owner for name, owner in found if name != owner}


def joined(*parts: str) -> str:
    """A dotted path; the model itself is the empty one.

    >>> joined("", "weight"), joined("0", "weight")
    ('weight', '0.weight')
    """
    return ".".join(part for part in parts if part)


def _damaged(path: Path, reason: str) -> ResultError:
    return ResultError(f"{path} is damaged: {reason}", help=_AGAIN)


def _scale_shape(
    module: nn.Module, role: str, spec: QuantizationSpec
) -> tuple[int, ...] | None:
    """None where it cannot be known: the channels of an activation."""
    if not is_parameter(role):
        return () if spec.qscheme == "per_tensor" else None
    parameter = module.get_parameter(parameters_of(module)[parameter_name(role)])
    shape = as_planned(module, parameter_name(role), parameter).shape
    return scale_shape(tuple(shape), spec.cut)


def _check_scale(
    name: str, scale: Tensor, zero_point: Tensor, shape: tuple[int, ...] | None
) -> None:
    if (
        not scale.numel()
        or scale.shape != zero_point.shape
        or (shape is not None and scale.shape != shape)
    ):
        raise ValueError(f"{name} is of another shape than its tensor needs")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{name} is not finite and positive")
