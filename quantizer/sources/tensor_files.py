"""Read tensors of `.safetensors`, `.pt`, `.pth`, `.npy` and `.npz` files, also as batches.

Code is never unpickled. An error says whether a file is empty, truncated, a Git LFS pointer, an
HTML page or pickled code.
"""

import io
import math
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.config.wording import a_kind
from quantizer.errors import DataError, QuantizerError
from quantizer.sources.arguments import UNKNOWN, Arguments
from quantizer.sources.batches import PLAIN, Batch
from quantizer.sources.tensor_kinds import oddity
from quantizer.storage.plain_files import require_plain
from quantizer.storage.process_memory import in_words
from quantizer.storage.safetensors_file import load_tensors

MOST_UNPACKED = 10**9
"""The bytes that a smaller file may unpack to: one of a few bytes may ask for any number."""
INPUT_NAMES = ("x", "input", "images", "data")
Named = dict[str, Tensor]

_NUMPY = numpy.lib.format
# Parsing a header takes two hundred times its length of memory.
_LONGEST_HEADER = 10_000
_SIZES = range(1 << 63)
_NUMPY_DTYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1")

# zipfile raises RuntimeError and its child NotImplementedError for encryption and unknown
# compression, ValueError and struct.error for a damaged directory: names that are not text,
# offsets before the beginning.
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
"""How files begin that hold something else, in small letters."""


class _UnreadableError(Exception):
    """Says why a file cannot be read, as the end of a sentence, and what to do, or None."""


def read_file(path: Path, error: type[QuantizerError], max_unpacked: int | None = None) -> Any:
    """Return what a tensor file holds: a dict of tensors, or for `.npy`, `.pt` and `.pth`
    whatever was saved.

    Args:
        max_unpacked: bytes that it may unpack to if it is smaller itself; by default
            `MOST_UNPACKED`.

    Raises:
        error: it cannot be read, or is too large. The sentence names the file and the reason.
    """
    limit = MOST_UNPACKED if max_unpacked is None else max_unpacked
    try:
        _require_data(path)
        _check_archive(path, limit)
        content = READERS[path.suffix.lower()](path)
        _check_tensors(path, content, limit)
    except _UnreadableError as cause:
        reason, remedy = cause.args
        raise error(f"{path} cannot be read: {reason}", help=remedy) from cause.__cause__
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause
    return content


def _require_data(path: Path) -> None:
    """Refuse a file that is empty or begins like something else."""
    require_plain(path)
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise _UnreadableError("it is empty", _AGAIN)
    start = start.lstrip().lower()
    for beginning, why in _NOT_DATA.items():
        if start.startswith(beginning):
            raise _UnreadableError(*why)


def _check_archive(path: Path, limit: int) -> None:
    """Refuse an archive of which little becomes much, before anything is unpacked."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except _ZIP_ERRORS:
        # Its reader says why
        return
    _check_size(path, size, limit)


def _check_tensors(path: Path, content: Any, limit: int) -> None:
    """Refuse a tensor that is larger than the limit: a view may show one value as many."""
    for value in pytree.tree_leaves(content):
        if isinstance(value, Tensor):
            _check_size(path, value.numel() * value.element_size(), limit)


def _check_size(path: Path, unpacked: int, limit: int) -> None:
    size = path.stat().st_size
    if unpacked > max(size, limit):
        text = (
            f"it has {in_words(size)} and would unpack to {in_words(unpacked)}, more than "
            f"{in_words(limit)}"
        )
        raise _UnreadableError(text, "--max_unpacked allows more, such as --max_unpacked 8GB")


def _read_safetensors(path: Path) -> Named:
    try:
        return load_tensors(path)
    except SafetensorError as cause:
        text = f"it is truncated or not a safetensors file ({cause})"
        raise _UnreadableError(text, _AGAIN) from cause


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # About the pickle protocol and TorchScript: what matters is raised below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as cause:
        raise _torch_failure(str(cause)) from cause


def _torch_failure(message: str) -> _UnreadableError:
    """Return why `torch.load` failed, of which it gives this message."""
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
    if "pickle" in message.lower() or "Weights only load failed" in message:
        text = "it is not a file that torch.save wrote, or it is damaged"
        return _UnreadableError(text, _AGAIN)
    return _UnreadableError("it is truncated or damaged", _AGAIN)


def _read_npy(path: Path) -> Tensor:
    with path.open("rb") as file:
        return _array(file)


def _read_npz(path: Path) -> Named:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except _ZIP_ERRORS as cause:
        text = f"it is truncated or not an npz archive ({cause})"
        raise _UnreadableError(text, _AGAIN) from cause
    named: Named = {}
    for name, content in members.items():
        named[name.removesuffix(".npy")] = _array(io.BytesIO(content))
    return named


def _array(file: IO[bytes]) -> Tensor:
    """Return an array in NumPy's format.

    numpy would take True for a size and -1 for any size, and would reserve memory for values
    that the file does not have. So its header is checked first.
    """
    if file.read(len(_NUMPY.MAGIC_PREFIX)) != _NUMPY.MAGIC_PREFIX:
        raise _UnreadableError("it is not a NumPy array file", None)
    file.seek(0)
    damaged = f"its NumPy header is damaged, or longer than {_LONGEST_HEADER} bytes"
    try:
        shape, dtype = _numpy_header(file)
    except Exception as cause:
        raise _UnreadableError(damaged, None) from cause
    if not all(type(size) is int and size in _SIZES for size in shape):
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
        # An array without values has sizes that are too large
        raise _UnreadableError(damaged, None) from cause
    return torch.from_numpy(array).contiguous()


def _numpy_header(file: IO[bytes]) -> tuple[tuple[int, ...], numpy.dtype[Any]]:
    """Return shape and dtype, and leave the file at the first value.

    Raises:
        Exception: the header is damaged; numpy and the parser of Python have many kinds.
    """
    major, _ = _NUMPY.read_magic(file)
    read_header = _NUMPY.read_array_header_2_0
    if major == 1:
        read_header = _NUMPY.read_array_header_1_0
    with warnings.catch_warnings():
        # About files that Python 2 wrote
        warnings.simplefilter("ignore")
        shape, _, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
    return shape, dtype


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".npy": _read_npy,
    ".npz": _read_npz,
}


def tensor_batches(
    paths: Sequence[Path],
    size: int,
    arguments: Arguments = UNKNOWN,
    max_unpacked: int | None = None,
) -> Iterator[Batch]:
    """Yield batches of `size` samples; the last one may be smaller. In every tensor, dimension
    0 counts the samples.

    A tensor named y, target, label or labels is the target. A tensor named x, input, images or
    data is the input, and so is a tensor that is the only one. Several others are keyword
    arguments. Beside such an input, only those are that `forward` takes.

    Args:
        arguments: what `forward` takes.

    Raises:
        DataError: a file cannot be read, or its tensors are not samples.
    """
    pending: Named = {}
    for path in paths:
        named = _named_tensors(path, arguments, max_unpacked)
        pending = _joined(pending, named, path) if pending else named
        while _count(pending) >= size:
            first = {name: tensor[:size] for name, tensor in pending.items()}
            yield _as_batch(first, arguments)
            pending = {name: tensor[size:] for name, tensor in pending.items()}
    if pending and _count(pending):
        yield _as_batch(pending, arguments)


def _named_tensors(path: Path, arguments: Arguments, max_unpacked: int | None) -> Named:
    """Return the tensors of a file, of which all have the same number of samples."""
    content = read_file(path, DataError, max_unpacked)
    named = {"x": content} if isinstance(content, Tensor) else content
    is_dict = isinstance(named, Mapping)
    if not is_dict or not all(isinstance(tensor, Tensor) for tensor in named.values()):
        raise DataError(f"{path} holds {a_kind(content)}, not a tensor or a dict of tensors")
    for name, tensor in named.items():
        reason = oddity(tensor)
        if reason is not None:
            raise DataError(f"{path} cannot be computed with: {name} {reason}", help=PLAIN)
    if not set(named) - set(arguments.labels):
        names = f"{', '.join(INPUT_NAMES[:-1])} or {INPUT_NAMES[-1]}"
        raise DataError(f"{path} holds no input tensor", help=f"name it {names}")
    _check_samples(path, named)
    return dict(named)


def _check_samples(path: Path, named: Mapping[str, Tensor]) -> None:
    """Refuse tensors that differ in dimension 0, and one that has more samples without values
    than its file has bytes.
    """
    size = path.stat().st_size
    counts: set[int | None] = set()
    for name, tensor in named.items():
        shape = list(tensor.shape)
        count = shape[0] if shape else None
        counts.add(count)
        if count is not None and count > size and not tensor.numel():
            raise DataError(f"{path} holds no values of {name}: its shape is {shape}")
    if None in counts or len(counts) != 1:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise DataError(f"the tensors of {path} differ in dimension 0, the samples: {listed}")


def _joined(first: Named, second: Named, path: Path) -> Named:
    """Return the samples of two files; `path` is the second."""
    if _kinds(first) != _kinds(second):
        raise DataError(
            f"{path} does not go with the files before it: {_listed(second)} after "
            f"{_listed(first)}"
        )
    return {name: torch.cat([tensor, second[name]]) for name, tensor in first.items()}


def _kinds(named: Named) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of one sample by the names of tensors."""
    return {name: (tensor.dtype, list(tensor.shape[1:])) for name, tensor in named.items()}


def _listed(named: Named) -> str:
    kinds = _kinds(named).items()
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in kinds)


def _count(named: Named) -> int:
    return next(iter(named.values())).shape[0]


def _as_batch(named: Named, arguments: Arguments) -> Batch:
    target = None
    others = dict(named)
    for label in arguments.labels:
        tensor = others.pop(label, None)
        if target is None:
            target = tensor
    main = next((name for name in INPUT_NAMES if name in others), None)
    inputs: Named = {}
    left_out: list[str] = []
    for name, tensor in others.items():
        if main is None or name == main or name in arguments.known:
            inputs[name] = tensor
        else:
            left_out.append(name)
    if len(inputs) == 1:
        (x,) = inputs.values()
        return replace(Batch.of(x, target), left_out=tuple(left_out))
    args: tuple[Tensor, ...] = ()
    if main is not None and main not in arguments.known:
        args = (inputs.pop(main),)
    return Batch(args, inputs, target, named, tuple(left_out))
