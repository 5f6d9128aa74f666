"""Puts the weights of a file into a module; checks that they fit and are finite. Weights are
data: no code is run.
"""

import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.config.wording import a_kind, first_names
from quantizer.errors import ModelError
from quantizer.nn.projections import keep_quiet_about
from quantizer.sources.batches import PLAIN, not_finite
from quantizer.sources.tensor_files import read_file
from quantizer.sources.tensor_kinds import oddity

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")
_WRAPPERS = ("state_dict", "model", "model_state_dict")


def load_weights(module: nn.Module, path: str, max_unpacked: int | None = None) -> None:
    """Copy the tensors of a `.safetensors` or `.pt/.pth` state dict into `module`.

    Raises:
        ModelError: the file is unreadable, holds something else or unpacks to too much, or a
            name or a shape differs.
    """
    if Path(path).suffix.lower() not in WEIGHT_SUFFIXES:
        raise ModelError(
            f"{path} is not a weights file",
            help=f"its name must end in {', '.join(WEIGHT_SUFFIXES)}",
        )
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ModelError(
            "the model has lazy layers, whose weights have no shape yet",
            help="give these layers their sizes",
        )
    state = _state_dict(read_file(Path(path), ModelError, max_unpacked), path)
    _check_fit(module, state, path)
    module.load_state_dict(state, strict=False)


def check_finite(module: nn.Module, besides: Container[str] = ()) -> None:
    """Raise `ModelError` naming the first parameter with NaN or Inf, or buffer with NaN (masks
    may hold -inf), but for those that are looked at elsewhere; or the first that cannot be
    computed with.
    """
    check_kinds(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or name in besides:
            continue  # a lazy one has no values before the first batch
        is_parameter = isinstance(tensor, nn.Parameter)
        bad = not_finite(
            tensor.detach(),
            torch.isfinite if is_parameter else lambda values: ~torch.isnan(values),
        )
        if bad:
            fault = "NaN or Inf" if is_parameter else "NaN"
            raise ModelError(
                f"the weights hold {fault}: {bad} of {tensor.numel()} values of {name}"
            )


def check_kinds(module: nn.Module) -> None:
    """Look for parameters and buffers that are sparse, quantized or without values, before the
    module runs.

    Raises:
        ModelError: naming the first.
    """
    keep_quiet_about(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor) and (reason := oddity(tensor)) is not None:
            raise ModelError(f"the model cannot be computed with: {name} {reason}", help=PLAIN)


def _state_dict(content: Any, path: str) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            logger.info("%s: taking the weights under %r", path, key)
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content:
        raise ModelError(
            f"{path} holds {_describe(content)}, not a state_dict",
            help="save model.state_dict()",
        )
    other = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    if other:
        raise ModelError(
            f"{path} is not a state_dict: {other[0]!r} is {_describe(content[other[0]])}, not "
            "a tensor",
            help="save model.state_dict(), alone or under one of the keys "
            f"{', '.join(_WRAPPERS)}",
        )
    return dict(content)


def _describe(content: Any) -> str:
    return "an empty dict" if content == {} else a_kind(content)


def _misfit(given: Tensor, wanted: Tensor) -> str | None:
    """Why values cannot be copied as they are: integers would become floats, complex numbers
    lose a part.
    """
    if (reason := oddity(given)) is not None:
        return reason.removeprefix("is ")
    kinds = [(each.is_floating_point(), each.is_complex()) for each in (given, wanted)]
    return None if kinds[0] == kinds[1] else f"{given.dtype}, the model has {wanted.dtype}"


def _check_fit(module: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    own = module.state_dict()
    # A file may store tied weights once
    given = {own[name].data_ptr() for name in state if name in own}
    missing = [
        name
        for name, tensor in own.items()
        if name not in state
        and not name.endswith("num_batches_tracked")
        and tensor.data_ptr() not in given
    ]
    kinds = [
        (name, why)
        for name, tensor in state.items()
        if name in own and (why := _misfit(tensor, own[name]))
    ]
    unexpected = [name for name in state if name not in own]
    misshaped = [
        f"{name} {list(tensor.shape)} (the model has {list(own[name].shape)})"
        for name, tensor in state.items()
        if name in own and tensor.shape != own[name].shape
    ]
    faults = {
        "missing in the file": missing,
        "not in the model": unexpected,
        "of another shape": misshaped,
    }
    faults["of another kind"] = [f"{name} ({why})" for name, why in kinds]
    lines = [
        f"{len(names)} {fault}: {first_names(names)}"
        for fault, names in faults.items()
        if names
    ]
    if not lines:
        return
    if unexpected and all(name.startswith("module.") for name in unexpected):
        lines.append(
            'the file comes from DataParallel: strip "module." from the names, or save '
            "model.module.state_dict()"
        )
    raise ModelError(f"the weights of {path} do not fit the model", help=lines)
