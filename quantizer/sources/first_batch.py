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
from quantizer.sources.data import Batches
from quantizer.sources.tensor_kinds import dtype_name
from quantizer.sources.user_code import frames_of, user_error, user_exits
from quantizer.storage.deferred_tensor import ChangedInPlaceError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RANDOM = {"torch.randn": (0.0, 1.0, 3.0), "torch.rand": (0.5, 12**-0.5, 1.8)}
"""The mean, the standard deviation and the kurtosis of random numbers."""
_MIN_VALUES = 2000
"""Fewer values may have these figures by chance."""
_MAX_VALUES = 100_000
"""Values that are looked at."""
_CHANCE = 4.0
"""By how many standard errors the figures of random numbers differ at most."""
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
        axis, place = "samples", 0
        if channels == 1 and tensor.shape[0] > 1:
            axis, place = "channels", 1
        yield f"the batch has no axis of {axis}: add it with unsqueeze({place})"
    elif tensor.dim() == rank and tensor.shape[1] != channels:
        text = f"it takes {channels} channels in axis 1"
        if tensor.shape[-1] == channels:
            axes = ", ".join(map(str, [0, rank - 1, *range(1, rank - 1)]))
            text += f"; they seem to be in the last axis: permute({axes}) moves them"
        yield text


def remarks_on_data(batches: Batches) -> Iterator[str]:
    """Yield a sentence on each input of the first batch that is like random numbers of torch.
    Data that are called random or an example are left out.
    """
    if batches.stamp or batches.stands_in:
        return
    for name, tensor in batches.first().tensors():
        function = _random_function(tensor)
        if function:
            yield (
                f"the data ({name}) look like {function}, and ranges of random numbers do not "
                "fit real inputs: calibrate on some 100 real samples"
            )


def _random_function(x: Tensor) -> str:
    """Return the function of torch whose random numbers a tensor is like: they have the same
    moments, and neighbours do not depend on each other. Return an empty text if there is none.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(2, 3, 32, 32, generator=generator)
    >>> _random_function(x), _random_function(x.cumsum(-1)), _random_function(x.exp())
    ('torch.randn', '', '')
    """
    if not x.is_floating_point() or x.numel() < _MIN_VALUES:
        return ""
    values = x.detach().flatten()[:_MAX_VALUES].double()
    for function, (mean, deviation, kurtosis) in _RANDOM.items():
        z = (values - mean) / deviation
        # Each with its standard error for one value
        figures = (
            (z.mean(), 1.0),
            (z.square().mean() - 1, (kurtosis - 1) ** 0.5),
            ((z**4).mean() - kurtosis, 10.0),
            ((z[1:] * z[:-1]).mean(), 1.0),
        )
        allowed = _CHANCE * len(z) ** -0.5
        if all(abs(float(figure)) <= allowed * error for figure, error in figures):
            return function
    return ""
