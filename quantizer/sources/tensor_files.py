"""Read the tensors of `.safetensors`, `.pt`, `.pth`, `.npy` and `.npz` files, and load the
weights of a file into a module.

Pickled code is never run. Errors say why a file cannot be read: it is empty, truncated, a Git
LFS pointer, an HTML page, or has pickled code.
"""

import io
import logging
import math
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from quantizer.config.wording import a_kind, first_names
from quantizer.errors import ModelError, QuantizerError
from quantizer.sources.tensor_kinds import WEIGHT_SUFFIXES, dtype_name, unsupported_reason
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.process_memory import size_text
from quantizer.storage.safetensors_file import deferred_file, load_tensors
from quantizer.storage.system_calls import require_file_or_folder

DEFAULT_MAX_UNPACKED = 10**9
"""The bytes that a compressed file may unpack to by default. A file of a few bytes can claim
any size.
"""
NamedTensors = dict[str, Tensor]

_NUMPY = numpy.lib.format
# NumPy parses a header as Python, which takes two hundred times as much memory as the header
_LONGEST_HEADER = 10_000
_POSSIBLE_SIZES = range(1 << 63)
_NUMPY_DTYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1")

# What zipfile raises for damaged files. RuntimeError, with its subclass NotImplementedError, is
# for encryption and unknown compression. ValueError and struct.error are for a damaged
# directory, such as names that are not text, or offsets before the beginning.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, struct.error)

_AGAIN = "copy or download it again"
_HTML = ("it is an HTML page", "the download gave a web page; fetch the raw file")
_NOT_DATA = {
    b"version https://git-lfs": (
        "it is a Git LFS pointer, not the file itself",
        "run: git lfs pull",
    ),
    b"<!doctype html": _HTML,
    b"<html": _HTML,
}
"""The first bytes of files that are not data, in lower case, with the reason and the help of
the error.
"""

_logger = logging.getLogger(__name__)
_WRAPPERS = ("state_dict", "model", "model_state_dict")


class _UnreadableError(Exception):
    """A file cannot be read. It has two arguments: the reason, as the end of a sentence, and
    what to do, or None.
    """


def read_file(path: Path, error: type[QuantizerError], max_unpacked: int | None) -> Any:
    """Return the content of a tensor file: a dict of tensors, for `.npy` a tensor, for `.pt`
    and `.pth` the saved object.

    Args:
        path: the file.
        error: the class of errors to raise.
        max_unpacked: the bytes that it may unpack to, if it is smaller itself. None for
            `DEFAULT_MAX_UNPACKED`.

    Raises:
        error: it cannot be read, or is too large.
    """
    limit = DEFAULT_MAX_UNPACKED if max_unpacked is None else max_unpacked
    with reading(path, error):
        require_data(path)
        _check_archive(path, limit)
        content = READERS[path.suffix.lower()](path)
        for value in pytree.tree_leaves(content):
            # An expanded tensor may have many more values than the file
            if isinstance(value, Tensor):
                _check_size(path, value.numel() * value.element_size(), limit)
    return content


def read_deferred(path: Path, error: type[QuantizerError]) -> dict[str, DeferredTensor]:
    """Return the tensors of a safetensors file, each to be read when it is needed.

    Raises:
        error: the file is missing, damaged or something else.
    """
    with reading(path, error):
        require_data(path)
        return deferred_file(path)


@contextmanager
def reading(path: Path, error: type[QuantizerError]) -> Iterator[None]:
    """Raise `error` if the file cannot be read inside the `with` block."""
    try:
        yield
    except _UnreadableError as cause:
        reason, remedy = cause.args
        raise error(f"{path} cannot be read: {reason}", help=remedy) from cause.__cause__
    except SafetensorError as cause:
        text = f"it is truncated or not a safetensors file ({cause})"
        raise error(f"{path} cannot be read: {text}", help=_AGAIN) from cause
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause


def require_data(path: Path) -> None:
    """Check that a file is not empty and does not begin like one that is not data.

    Raises:
        _UnreadableError: it is, or does.
    """
    require_file_or_folder(path)
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise _UnreadableError("it is empty", _AGAIN)
    start = start.lstrip().lower()
    for beginning, why in _NOT_DATA.items():
        if start.startswith(beginning):
            raise _UnreadableError(*why)


def _check_archive(path: Path, limit: int) -> None:
    """Check the size of an archive's content before anything is unpacked.

    Raises:
        _UnreadableError: it is too large.
    """
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except _ZIP_ERRORS:
        # The reader of the file will raise a better error
        return
    _check_size(path, size, limit)


def _check_size(path: Path, unpacked: int, limit: int) -> None:
    size = path.stat().st_size
    if unpacked > max(size, limit):
        text = (
            f"it has {size_text(size)} and would unpack to {size_text(unpacked)}, more than "
            f"{size_text(limit)}"
        )
        raise _UnreadableError(
            text, "<--max_unpacked> allows more, such as <--max_unpacked 8GB>"
        )


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # torch warns about the pickle protocol and about TorchScript. Errors are raised
            # below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as cause:
        raise _torch_failure(str(cause)) from cause


def _torch_failure(message: str) -> _UnreadableError:
    """Return the reason for an error of `torch.load`, from its message."""
    pickled = re.search(r"GLOBAL ([\w.]+)", message)
    if pickled:
        return _UnreadableError(
            f"it holds the pickled object {pickled[1]}, and loading that could run code",
            "if you trust it, save only its weights: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=False).state_dict(), "
            "'weights.safetensors')",
        )
    if "TorchScript" in message:
        return _UnreadableError(
            "it is a TorchScript archive, which is a program",
            "save the state_dict of the Python model",
        )
    text = "it is not a file that torch.save wrote, or it is damaged"
    return _UnreadableError(text, _AGAIN)


def _read_npy(path: Path) -> Tensor:
    with path.open("rb") as file:
        return _read_array(file)


def _read_npz(path: Path) -> NamedTensors:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except _ZIP_ERRORS as cause:
        text = f"it is truncated or not an npz archive ({cause})"
        raise _UnreadableError(text, _AGAIN) from cause
    named: NamedTensors = {}
    for name, content in members.items():
        named[name.removesuffix(".npy")] = _read_array(io.BytesIO(content))
    return named


def _read_array(file: IO[bytes]) -> Tensor:
    """Return a tensor from a file in NumPy's format.

    The header is checked first: numpy accepts True and -1 as sizes, and reserves memory for
    values that the file does not have.
    """
    if file.read(len(_NUMPY.MAGIC_PREFIX)) != _NUMPY.MAGIC_PREFIX:
        raise _UnreadableError("it is not a NumPy array file", None)
    file.seek(0)
    damaged = f"its NumPy header is damaged, or longer than {_LONGEST_HEADER} bytes"
    try:
        shape, dtype = _numpy_header(file)
    except Exception as cause:
        raise _UnreadableError(damaged, None) from cause
    if not all(type(size) is int and size in _POSSIBLE_SIZES for size in shape):
        raise _UnreadableError(damaged, None)
    if dtype.str not in _NUMPY_DTYPES:
        help_ = f"save it as one of {', '.join(_NUMPY_DTYPES)}"
        raise _UnreadableError(f"its dtype {dtype.str!r} has no tensor", help_)
    start = file.tell()
    size = file.seek(0, os.SEEK_END) - start
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        text = f"it is truncated: {size} bytes of data, {expected} expected"
        raise _UnreadableError(text, None)
    file.seek(0)
    try:
        array = numpy.load(file, allow_pickle=False)
    except (ValueError, OverflowError) as cause:
        # An array without values may have sizes that numpy cannot multiply
        raise _UnreadableError(damaged, None) from cause
    return torch.from_numpy(array).contiguous()


def _numpy_header(file: IO[bytes]) -> tuple[tuple[int, ...], numpy.dtype[Any]]:
    """Return shape and dtype. The file is then at the position of the first value.

    Raises:
        Exception: the header is damaged. numpy and Python's parser raise many classes of
            errors.
    """
    major, _ = _NUMPY.read_magic(file)
    read_header = _NUMPY.read_array_header_2_0
    if major == 1:
        read_header = _NUMPY.read_array_header_1_0
    with warnings.catch_warnings():
        # numpy warns about files that Python 2 wrote
        warnings.simplefilter("ignore")
        shape, _, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
    return shape, dtype


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".safetensors": load_tensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".npy": _read_npy,
    ".npz": _read_npz,
}


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
