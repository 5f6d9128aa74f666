"""Save a quantized model to a folder, and load it into a float model.

model.safetensors holds its tensors and quantizer.json says what they are. Neither holds code.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.changed_modules import put
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import a_kind
from quantizer.errors import ModelError, VerificationError
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import tensor_leaves
from quantizer.export.saved_description import (
    DESCRIPTION,
    SAVED_FORMAT,
    SAVED_TENSORS,
    bias_shape,
    parameter_path,
    read_saved,
    structure_of,
)
from quantizer.export.transformers_models import first_names, quantized_layers
from quantizer.graph.modules import as_planned, parameters_of
from quantizer.nn.inplace import (
    InPlace,
    add_bias,
    all_or_nothing,
    insert_before,
    keep_layers_called,
    lacks_bias,
    rectify_output,
)
from quantizer.nn.layer import check_float
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import pack
from quantizer.results.result_set import locked, replace_set
from quantizer.sources.batches import Batch
from quantizer.storage.files import cannot_write, write_json, write_tensors
from quantizer.storage.opened_files import json_digest
from quantizer.storage.replacing import replaced_folder


def save_quantized(model: nn.Module, folder: Path) -> None:
    """Write a quantized model to a folder. What an earlier call has written there stays until
    the new files are complete.

    Raises:
        ModelError: the model is not quantized, or has state that is not a tensor.
        UsageError: the folder holds other files.
        ResultError: the folder cannot be written.
    """
    with locked(folder), replace_set(folder, main=DESCRIPTION) as new:
        _write_quantized(model, new)


def _write_quantized(model: nn.Module, folder: Path) -> None:
    """Write `model.safetensors` and `quantizer.json` to an empty folder.

    The tensors are those of `model.state_dict()`, a tied one once. A quantized parameter is
    stored as its codes, those of fewer than 8 bits packed (`numerics.codes.pack`). The JSON has

    - `structure`: what a float model must have in common with this one, in words.
    - `layers`: the quantized layers by path. Each has the spec of each tensor by role, the
      dtype of a parameter that is stored as codes, and the layers inserted before it. It also
      says whether its output is quantized after a ReLU.
    - `ties`: the first name of a tensor by each further one.
    - `biases`: the layers to which an algorithm gave one.
    - `files` and `checksum`: the checksums of model.safetensors and of the rest of this file.

    Raises:
        ModelError: the model is not quantized, or has state that is not a tensor.
        ResultError: the folder cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {a_kind(model)}, not a torch.nn.Module")
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{name} in the state of the model is not a tensor, so it cannot be saved"
            )
    ties = {
        name: first_name
        for name, first_name in first_names(model).items()
        if name != first_name and name in state and first_name in state
    }
    for name in ties:
        del state[name]
    layers = {
        path: _layer_entry(path, layer, state)
        for path, layer in quantized_layers(model).items()
    }
    modules = model.named_modules()
    biases = [path for path, module in modules if "has_added_bias" in vars(module)]
    description = {
        "format": SAVED_FORMAT,
        "model": type(model).__name__,
        "files": {SAVED_TENSORS: write_tensors(folder / SAVED_TENSORS, state)},
        "structure": structure_of(model),
        "layers": layers,
        "ties": ties,
        "biases": biases,
    }
    checksum = json_digest(description)
    write_json(folder / DESCRIPTION, {**description, "checksum": checksum})


def _layer_entry(path: str, layer: InPlace, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return what quantizer.json has about a layer, and replace its quantized parameters in
    `state` by their codes.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for role, quantizer in layer.quantizers.items():
        assert isinstance(quantizer, TensorQuantizer)
        tensors[role] = {"spec": quantizer.spec.to_json()}
        name = parameter_path(path, layer, role)
        # A tied parameter has its codes in the layer of its first name
        if is_parameter(role) and name in state:
            value = as_planned(layer, parameter_name(role), state[name])
            encoded = quantizer.tensor.encoded(value)
            if encoded.codes is not None:
                tensors[role]["codes"] = str(value.dtype).removeprefix("torch.")
                state[name] = pack(encoded.codes, encoded.spec)
    input_layers = [type(inserted).__name__ for inserted in getattr(layer, "input_layers", ())]
    return {
        "is_rectified": layer.rectifies_output,
        "input_layers": input_layers,
        "tensors": tensors,
    }


def save_verified(
    model: nn.Module, reference: nn.Module, folder: Path, batches: Iterable[Batch]
) -> Verification:
    """Write the state of a quantized model into a new folder, load it and compare the outputs.

    Args:
        model: quantized.
        reference: the same in float. It takes up the state.
        folder: a new folder, or one that `save_quantized` has written.
        batches: on the device of the models; at least one.

    Raises:
        ModelError: the model has state that is not a tensor.
        ResultError: the folder cannot be written.
        UsageError: something else is at `folder`.
        VerificationError: what was loaded gives other outputs. Nothing is written.
    """
    agreement = Agreement("outputs")
    try:
        folder.parent.mkdir(exist_ok=True)
        with replaced_folder(folder) as new:
            _write_quantized(model, new)
            load_quantized(reference, new)
            for batch in batches:
                with torch.no_grad():
                    expected = tensor_leaves(model(*batch.args, **batch.kwargs))
                    actual = tensor_leaves(reference(*batch.args, **batch.kwargs))
                agreement.add(expected, actual)
            verification = agreement.result()
            if verification.equal < 1:
                raise VerificationError(
                    f"{folder.name} is not written: a model that loads it gives other outputs: "
                    f"{verification.figures()}",
                    help="check that the model gives the same outputs for equal inputs",
                )
    except OSError as error:
        raise cannot_write(folder, error) from error
    return verification


def load_quantized(model: nn.Module, folder: Path) -> None:
    """Give a float model the state of a saved one, in place; its weights may be of any value,
    or on the meta device.

    Raises:
        ModelError: `model` is not a float module.
        ResultError: the files are missing or damaged, or are of another model. The model is
            as it was after both.
    """
    check_float(model)
    saved = read_saved(folder)
    modules = dict(model.named_modules(remove_duplicate=False))
    with all_or_nothing(model):
        for path in saved.biases:
            module = modules.get(path)
            if module is not None and lacks_bias(module) and parameters_of(module):
                add_bias(module, torch.zeros(bias_shape(module)))
        saved.check(model)
        quantized = saved.quantized(modules)
        values = saved.values(model, quantized)
        placed: dict[str, Tensor] = {}
        for name, value in values.items():
            owner = saved.ties.get(name, name)
            path, _, attribute = name.rpartition(".")
            if owner not in placed:
                old = getattr(modules[path], attribute)
                placed[owner] = _in_place_of(old, value)
            setattr(modules[path], attribute, placed[owner])
        for path, layer in saved.inserted(modules):
            device = next(modules[path].parameters()).device
            insert_before(modules[path], path, layer.to(device))
        for (path, role), tensor in quantized.items():
            put(modules[path], path, role, tensor)
        for path, entry in saved.layers.items():
            if entry["is_rectified"] and "activation" in entry["tensors"]:
                rectify_output(modules[path])
        keep_layers_called(model)


def _in_place_of(old: Tensor, value: Tensor) -> Tensor:
    """Return a value as a tensor like the old one: on its device, and a parameter if it is
    one.
    """
    if not old.is_meta:
        value = value.to(old.device)
    if not isinstance(old, nn.Parameter):
        return value
    requires_grad = old.requires_grad and value.is_floating_point()
    return nn.Parameter(value, requires_grad=requires_grad)
