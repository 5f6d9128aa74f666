"""Explains why a model cannot run on its first batch: what a layer got, and what it takes."""

import inspect
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import first_names
from quantizer.errors import DataError, ModelError
from quantizer.sources.batches import Batch
from quantizer.sources.tensor_kinds import dtype_name
from quantizer.sources.user_code import frames_of, user_error, user_exits
from quantizer.storage.deferred_tensor import ChangedInPlaceError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INPUT_NAMES = ("input", "x", "hidden_states")
"""What layers call the tensor that they compute on."""


def try_first_batch(module: nn.Module, batch: Batch) -> None:
    """Run a model that could not be traced on the batch that was to trace it.

    Raises:
        DataError: it cannot run at all, so the batch does not fit the model.
        ModelError: it would end the process.
    """
    shown = ", ".join(_shown(tensor) for _, tensor in batch.tensors())
    what = f"running the model on the first batch ({shown})"
    with torch.random.fork_rng(), torch.no_grad(), user_exits(what, ModelError):
        try:
            module(*batch.args, **batch.kwargs)
        except ChangedInPlaceError:
            # The batch is not at fault: with its values in memory the model may run
            return
        except Exception as cause:
            remedies = [*_remedies(module, batch, cause), *frames_of(cause)]
            message = user_error(what, cause, DataError).message
            # torch appends a list of signatures to some errors
            text = message.partition(", but expected one of:")[0]
            raise DataError(text, help=remedies) from cause


def _shown(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"


def _remedies(module: nn.Module, batch: Batch, cause: Exception) -> Iterator[str]:
    """Yield sentences on the argument or the layer that does not fit."""
    for index, argument in enumerate(batch.args):
        if isinstance(argument, (tuple, list)):
            kind = type(argument).__name__
            yield (
                f"argument {index} is a {kind} of {len(argument)}: for inputs and a target "
                "write (left, right, target), not ((left, right), target)"
            )
    unfilled = _unfilled(module, batch)
    if "NoneType" in str(cause) and unfilled:
        yield f"the batch leaves these arguments of forward() at None: {first_names(unfilled)}"
    yield from layer_remedies(module, cause)


def layer_remedies(module: nn.Module, cause: BaseException) -> Iterator[str]:
    """Yield sentences on the layer in which a call of the model failed, if it was in one."""
    failed = _failed_layer(module, cause)
    if failed is None:
        return
    path, layer, tensor = failed
    if tensor is None:
        yield f"it failed in the layer {path}, a {_described(layer)}"
        return
    yield f"the layer {path}, a {_described(layer)}, got {_shown(tensor)}"
    yield from _misfits(layer, tensor)


def _unfilled(module: nn.Module, batch: Batch) -> list[str]:
    """Return the arguments of `forward` that are None by default, and that a batch lacks."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names: list[str] = []
    for parameter in parameters[len(batch.args) :]:
        if parameter.default is None and parameter.name not in batch.kwargs:
            names.append(parameter.name)
    return names


def _failed_layer(
    module: nn.Module, cause: BaseException
) -> tuple[str, nn.Module, Tensor | None] | None:
    """Return the innermost layer of the model in an exception's frames, with its input."""
    paths = {id(layer): path for path, layer in module.named_modules()}
    failed: tuple[str, nn.Module, Tensor | None] | None = None
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        layer = frame.f_locals.get("self")
        path = paths.get(id(layer))
        if path and isinstance(layer, nn.Module):
            failed = (path, layer, _input_of(frame.f_locals))
    return failed


def _input_of(variables: dict[str, Any]) -> Tensor | None:
    for name in _INPUT_NAMES:
        value = variables.get(name)
        if isinstance(value, Tensor):
            return value
    args = variables.get("args")
    if isinstance(args, tuple) and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def _described(layer: nn.Module) -> str:
    """Return a layer's class, with its settings if it has no layers of its own."""
    if next(layer.children(), None) is not None:
        return type(layer).__name__
    return " ".join(repr(layer).split())


def _misfits(layer: nn.Module, tensor: Tensor) -> Iterator[str]:
    """Yield what a layer takes that the tensor is not."""
    if not isinstance(layer, (nn.Linear, *_CONVOLUTIONS)):
        return
    weight = layer.weight
    if tensor.dtype != weight.dtype:
        yield f"it computes in {dtype_name(weight.dtype)}: convert the batch"
    if isinstance(layer, nn.Linear):
        if tensor.shape[-1:] != (layer.in_features,):
            yield f"it takes {layer.in_features} values in the last axis"
        return
    channels = layer.in_channels
    rank = weight.dim()
    if tensor.dim() == rank - 1:
        yield "the batch has no axis of samples: add it with unsqueeze(0)"
    elif tensor.dim() == rank and tensor.shape[1] != channels:
        text = f"it takes {channels} channels in axis 1"
        if tensor.shape[-1] == channels:
            axes = ", ".join(map(str, [0, rank - 1, *range(1, rank - 1)]))
            text += f"; they seem to be in the last axis: permute({axes}) moves them"
        yield text
