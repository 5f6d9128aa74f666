"""Load the weights of a file into a module. No code of the file runs."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.config.wording import a_kind, first_names
from quantizer.errors import ModelError
from quantizer.sources.files.tensor_files import read_file
from quantizer.sources.tensor_kinds import WEIGHT_SUFFIXES, dtype_name, unsupported_reason

_logger = logging.getLogger(__name__)

_WRAPPERS = ("state_dict", "model", "model_state_dict")


def load_weights(module: nn.Module, path: str, max_unpacked: int | None = None) -> None:
    """Copy the tensors of a `.safetensors` or `.pt/.pth` state dict into `module`.

    Raises:
        ModelError: the file is unreadable, holds something else or unpacks to too much, or
            names, shapes or dtypes differ.
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
    content = read_file(Path(path), ModelError, max_unpacked)
    state = _state_dict(content, path)
    _check_fit(module, state, path)
    module.load_state_dict(state, strict=False)


def _state_dict(content: Any, path: str) -> dict[str, Tensor]:
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            _logger.info("%s: taking the weights under %r", path, key)
            content = content[key]
            break
    if not isinstance(content, Mapping) or not content:
        raise ModelError(
            f"{path} holds {_describe(content)}, not a state_dict",
            help="save model.state_dict()",
        )
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{path} is not a state_dict: {str(key)!r} is {_describe(value)}, not a tensor",
                help="save model.state_dict(), alone or under one of the keys "
                f"{', '.join(_WRAPPERS)}",
            )
    return dict(content)


def _describe(content: Any) -> str:
    return "an empty dict" if content == {} else a_kind(content)


def _check_fit(module: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    """Raise `ModelError` unless the tensors can be copied into the module."""
    model_state = module.state_dict()
    unexpected: list[str] = []
    misshaped: list[str] = []
    unlike: list[str] = []
    for name, tensor in state.items():
        if name not in model_state:
            unexpected.append(name)
            continue
        parameter = model_state[name]
        if tensor.shape != parameter.shape:
            shapes = f"{list(tensor.shape)} (the model has {list(parameter.shape)})"
            misshaped.append(f"{name} {shapes}")
        reason = _misfit(tensor, parameter)
        if reason is not None:
            unlike.append(f"{name} {reason}")
    faults = {
        "missing in the file": _missing(model_state, state),
        "not in the model": unexpected,
        "of another shape": misshaped,
        "of another kind": unlike,
    }
    lines: list[str] = []
    for fault, names in faults.items():
        if names:
            lines.append(f"{len(names)} {fault}: {first_names(names)}")
    if not lines:
        return
    if unexpected and all(name.startswith("module.") for name in unexpected):
        lines.append(
            'the file comes from DataParallel: strip "module." from the names, or save '
            "model.module.state_dict()"
        )
    raise ModelError(f"the weights of {path} do not fit the model", help=lines)


def _missing(model_state: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the names that a file lacks. A tied weight needs only one of its names."""
    stored = {model_state[name].data_ptr() for name in state if name in model_state}
    missing: list[str] = []
    for name, parameter in model_state.items():
        if name in state or name.endswith("num_batches_tracked"):
            continue
        if parameter.data_ptr() not in stored:
            missing.append(name)
    return missing


def _misfit(tensor: Tensor, parameter: Tensor) -> str | None:
    """Return why a tensor must not be copied into a parameter, or None if it may.

    A copy from integers to floats is refused, and so is one from complex to real numbers, which
    loses the imaginary part.
    """
    reason = unsupported_reason(tensor)
    if reason is not None:
        return reason
    is_alike = tensor.is_floating_point() == parameter.is_floating_point()
    if is_alike and tensor.is_complex() == parameter.is_complex():
        return None
    dtype = dtype_name(tensor.dtype)
    return f"has the dtype {dtype} (the model has {dtype_name(parameter.dtype)})"
