"""Read a model that `ModelQuantizer.save` wrote, and check it against the model that loads it.

Nothing is changed here. What these functions return only has to be put into the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.fingerprint import first_difference
from quantizer.calibration.fits_model import is_sound, qparams_fault, scales_fault
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_name
from quantizer.config.wording import a_kind
from quantizer.errors import ResultError
from quantizer.graph.modules import as_planned, as_stored, operator_of, parameters_of
from quantizer.graph.ops import OPS
from quantizer.nn.inplace import InPlace, check_quantizable
from quantizer.nn.load import unpacked_codes
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.nn.rare_layers import InputRotation, InputScale
from quantizer.numerics.codes import storage_dtype
from quantizer.numerics.formats import has_minimum
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import Key
from quantizer.results.validation import checked_json, spec_fault
from quantizer.storage.files import damaged, read_json, read_tensors
from quantizer.storage.opened_files import FileSetKind, OpenFile, json_digest, open_files

SAVED_FORMAT = 6  # 6: quantizer.json has the structure of the model
SAVED_TENSORS = "model.safetensors"
DESCRIPTION = "quantizer.json"
_AGAIN = "save the model again with ModelQuantizer.save"
_CHANGED = "checksum mismatch: the file changed after it was saved"
_KIND = FileSetKind(
    DESCRIPTION,
    changed=f"is damaged: {_CHANGED}",
    missing="ModelQuantizer.save(model, folder) writes it",
    again=_AGAIN,
)

_Modules = Mapping[str, nn.Module]
"""The modules of a model by path."""


@dataclass(frozen=True)
class SavedModel:
    """A saved model whose files are complete, unchanged and agree with their schema.

    Attributes:
        folder: that holds the files.
        tensors: those of model.safetensors, by the names of the model's `state_dict`.
        model: the name of its class.
        structure: what `structure_of` returns for it.
        layers: the entry of each quantized layer in quantizer.json, by path.
        ties: the first name of a tensor, by each further one.
        biases: the paths of layers that an algorithm gave a bias.
    """

    folder: Path
    tensors: Mapping[str, Tensor]
    model: str
    structure: Mapping[str, str]
    layers: Mapping[str, Any]
    ties: Mapping[str, str]
    biases: Sequence[str]

    def check(self, model: nn.Module) -> None:
        """Refuse a model that cannot take up the state of the saved one.

        Raises:
            ResultError: it has another structure. The first difference is named.
            ModelError: a layer cannot be quantized in place.
        """
        structure = structure_of(model)
        place = first_difference(self.structure, structure)
        if place is not None:
            saved_fact = self.structure.get(place, "not")
            fact = structure.get(place, "not")
            raise ResultError(
                f"{place} is {saved_fact} in the file and {fact} in the model",
                help=f"load it into a float {self.model} that is built like the saved one",
            )
        modules = dict(model.named_modules())
        for path, layer in self.layers.items():
            if path not in modules:
                raise self._damaged(f"layers/{path}", "there is no such layer")
            check_quantizable(modules[path], path or "the model", layer["tensors"])

    def _entries(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield path, role and entry of each quantized tensor."""
        for path, layer in self.layers.items():
            for role, entry in layer["tensors"].items():
                yield path, role, entry

    def quantized(self, modules: _Modules) -> dict[Key, QuantizedTensor]:
        """Return how the tensors of layers are quantized, by path and role, without codes.

        Raises:
            ResultError: a layer has no such tensor, or it cannot be quantized like that.
        """
        tensors = {}
        for path, role, entry in self._entries():
            fault = spec_fault(entry["spec"], role)
            if fault is None:
                spec = QuantizationSpec(**entry["spec"])
                scale = self._qparam(path, role, "scale")
                zero_point = self._qparam(path, role, "zero_point")
                tensor = QuantizedTensor(spec, scale, zero_point)
                tensors[path, role] = tensor
                fault = _fault(modules[path], role, tensor)
            if fault:
                raise self._damaged(f"layers/{path}/tensors/{role}", fault)
        return tensors

    def _qparam(self, path: str, role: str, part: str) -> Tensor:
        """Return the scale or the zero point of a quantizer, empty if it is not there."""
        name = join_path(path, "quantizers", role, part)
        owner = self.ties.get(name, name)
        return self.tensors.get(owner, torch.empty(0))

    def values(
        self, model: nn.Module, quantized: Mapping[Key, QuantizedTensor]
    ) -> dict[str, Tensor]:
        """Return the tensors of the model's state by name. Codes are decoded.

        Args:
            model: that passed `check`.
            quantized: what `quantized` returned.

        Raises:
            ResultError: a tensor is not of the kind or the shape of the model's, or not finite.
        """
        stored = dict(self.tensors)
        for path, role, entry in self._entries():
            module = model.get_submodule(path)
            name = parameter_path(path, module, role)
            if "codes" not in entry or name not in stored:
                continue
            dtype = getattr(torch, entry["codes"])
            tensor = replace(quantized[path, role], dtype=dtype)
            try:
                stored[name] = _decoded(module, role, tensor, stored[name])
            except (TypeError, ValueError, RuntimeError) as error:
                raise self._damaged(name, str(error), SAVED_TENSORS) from error
        values = {}
        dtypes: dict[torch.dtype, torch.dtype] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict()
        for name, before in state.items():
            owner = self.ties.get(name, name)
            value = stored.get(owner)
            if value is None or owner not in state:
                raise self._damaged(name, "it is missing", SAVED_TENSORS)
            fault = _value_fault(value, before, name in parameters)
            # All tensors of one dtype in the model may be of another one in the file
            same_dtype = dtypes.setdefault(before.dtype, value.dtype)
            if value.dtype != same_dtype:
                fault = f"it is {value.dtype}, and others like it are {same_dtype}"
            if fault:
                raise self._damaged(name, fault, SAVED_TENSORS)
            values[name] = value
        return values

    def inserted(self, modules: _Modules) -> Iterator[tuple[str, nn.Module]]:
        """Yield the path of a module and a layer that algorithms inserted before it.

        Raises:
            ResultError: the layer cannot be there.
        """
        for path, layer in self.layers.items():
            operator = operator_of(modules[path])
            channels = _input_channels(modules[path])
            for number, class_name in enumerate(layer["input_layers"]):
                name = join_path(path, "input_layers", str(number), "weight")
                weight = self.tensors.get(name, torch.empty(0))
                is_of_channels = channels > 0 and list(weight.shape) == [channels]
                if operator is None or not is_of_channels or not is_sound(weight):
                    reason = "expected a finite number for each channel that the layer reads"
                    raise self._damaged(name, reason, SAVED_TENSORS)
                inserted: nn.Module
                if class_name == "InputScale":
                    inserted = InputScale(channels, OPS[operator].channels or 0)
                else:
                    inserted = InputRotation(channels)
                inserted.weight = nn.Parameter(weight, requires_grad=False)
                yield path, inserted

    def _damaged(self, where: str, reason: str, file: str = DESCRIPTION) -> ResultError:
        """Return the error about a place in a file."""
        error = damaged(self.folder / file, where, reason)
        return ResultError(error.message, help=_AGAIN)


def read_saved(folder: Path) -> SavedModel:
    """Return the model in a folder. Both files are opened before one is read.

    Raises:
        ResultError: a file is missing or damaged.
    """
    opened = open_files(folder, _KIND, lambda index: _description(index)["files"])
    description = _description(opened[DESCRIPTION])
    for key in ("format", "files", "checksum"):
        del description[key]
    with _with_remedy():
        return SavedModel(folder, read_tensors(opened[SAVED_TENSORS]), **description)


def _description(file: OpenFile) -> dict[str, Any]:
    """Return the content of quantizer.json.

    Raises:
        ResultError: `save_quantized` cannot have written it.
    """
    with _with_remedy():
        content = read_json(file)
    if not isinstance(content, dict) or content.get("format") != SAVED_FORMAT:
        raise ResultError(
            f"{file.path} has another format than {SAVED_FORMAT}, which this version reads",
            help="quantize the model again and save it",
        )
    checksum = content.pop("checksum", None)
    if checksum != json_digest(content):
        raise ResultError(f"{file.path} is damaged: {_CHANGED}", help=_AGAIN)
    with _with_remedy():
        description: dict[str, Any] = checked_json(file)
    return description


@contextmanager
def _with_remedy() -> Iterator[None]:
    """Give errors on files the remedy of a saved model."""
    try:
        yield
    except ResultError as error:
        raise ResultError(error.message, help=_AGAIN) from error


def structure_of(model: nn.Module) -> dict[str, str]:
    """Return what a model must have in common with another one to take up its state, in words.

    A quantized model has the structure of its float model, except for the biases that
    algorithms added.
    """
    structure = {}
    added_prefixes = []
    first_paths: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        where = path or "the model"
        operator = operator_of(module)
        if operator is not None:
            structure[where] = a_kind(module)
            structure[f"the operator of {where}"] = operator
            first_path = first_paths.setdefault(module, where)
            if first_path != where:
                structure[where] = f"the same as {first_path}"
        if isinstance(module, InPlace):
            for part in ("quantizers.", "input_layers."):
                added_prefixes.append(join_path(path, part))
    for name, value in model.state_dict().items():
        if not name.startswith(tuple(added_prefixes)):
            structure[name] = str(list(getattr(value, "shape", ())))
    return structure


def join_path(*parts: str) -> str:
    """Return a dotted path; the model itself is the empty one.

    >>> join_path("", "weight"), join_path("0", "weight")
    ('weight', '0.weight')
    """
    return ".".join(part for part in parts if part)


def parameter_path(path: str, module: nn.Module, role: str) -> str:
    """Return the name of the parameter in a role of the layer at `path`."""
    key = parameter_name(role)
    return join_path(path, parameters_of(module).get(key, key))


def _planned(module: nn.Module, role: str) -> Tensor | None:
    """Return the parameter in a role of a layer, with its axes as in a plan, or None."""
    key = parameter_name(role)
    attribute = parameters_of(module).get(key)
    if attribute is None:
        return None
    return as_planned(module, key, module.get_parameter(attribute))


def bias_shape(module: nn.Module) -> list[int]:
    """Return the shape that the bias of a layer has."""
    weight = _planned(module, "weights")
    channels = 0 if weight is None else len(weight)
    return [getattr(module, "out_channels", channels)]


def _input_channels(module: nn.Module) -> int:
    """Return how many channels a layer reads, 0 if that is not known."""
    weight = _planned(module, "weights")
    if weight is None or weight.dim() < 2:
        return 0
    return int(getattr(module, "in_channels", weight.shape[1]))


def _fault(module: nn.Module, role: str, tensor: QuantizedTensor) -> str | None:
    """Return why a tensor of a layer cannot be quantized like this."""
    parameter = _planned(module, role)
    if parameter is None and role not in ("input", "activation"):
        return "the layer has no such tensor"
    if not tensor.spec.has_stored_scale:
        return None
    spec = tensor.spec.stored
    qparams = QParams(tensor.scale, tensor.zero_point)
    dtypes = (qparams.scale.dtype, qparams.zero_point.dtype)
    zero_point_dtype = torch.float32 if has_minimum(spec.dtype) else torch.int32
    if not qparams.scale.numel() or dtypes != (torch.float32, zero_point_dtype):
        return f"it has no scale in float32 with a zero point in {zero_point_dtype}"
    if parameter is not None:
        return qparams_fault(spec, tuple(parameter.shape), qparams)
    # The file does not say how many channels a layer reads or returns
    expected = () if spec.qscheme == "per_tensor" else tuple(qparams.scale.shape)
    return scales_fault(spec, expected, qparams)


def _decoded(module: nn.Module, role: str, tensor: QuantizedTensor, stored: Tensor) -> Tensor:
    """Return the values of a parameter whose codes a file stores, in the form of the module.

    Raises:
        ValueError: they are not codes of this parameter.
    """
    parameter = _planned(module, role)
    if parameter is None:
        raise ValueError("an activation has no codes")
    codes = unpacked_codes(stored, tensor.spec, parameter.shape)
    if codes.dtype != storage_dtype(tensor.spec):
        raise ValueError(f"its codes are stored as {codes.dtype}")
    decoded = replace(tensor, codes=codes).decoded()
    return as_stored(module, parameter_name(role), decoded).contiguous()


def _value_fault(value: Tensor, before: Tensor, is_parameter: bool) -> str | None:
    """Return why a tensor cannot take the place of another one in a model."""
    is_float = before.is_floating_point()
    is_of_bytes = before.itemsize == 1
    kind = (value.shape, value.is_floating_point(), value.itemsize == 1)
    if kind != (before.shape, is_float, is_of_bytes):
        return (
            f"it is {list(value.shape)} of {value.dtype} in the file and "
            f"{list(before.shape)} of {before.dtype} in the model"
        )
    # torch cannot tell which values of 8 bits are infinite
    if is_of_bytes:
        return None
    if value.isnan().any() or (is_parameter and value.isinf().any()):
        return "it holds NaN or infinity"
    return None
