"""Named tensors of `.safetensors`, `.pt/.pth`, `.npy` and `.npz` files, also as batches. Never
unpickles code.

Nothing falls back, and numpy is not needed. Unreadable files are told apart: empty, Git LFS
pointer, HTML page, truncated, pickled code.
"""

import ast
import io
import math
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

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
"""The bytes that a smaller file may unpack to: one of a few may ask for any number."""
LONGEST_HEADER = 10_000
"""Of a NumPy array, as numpy has it; parsing one takes two hundred times its length of
memory.
"""
LARGEST_SIZE = 1 << 63
INPUT_NAMES = ("x", "input", "images", "data")
Named = dict[str, Tensor]

_NPY_DTYPES = {
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "<i2": torch.int16,
    "|i1": torch.int8,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}


# zipfile raises RuntimeError and its child NotImplementedError for encryption and unknown
# compression, ValueError and struct.error for a damaged directory: names that are no text,
# offsets before the beginning.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, struct.error)


_AGAIN = "copy or download it again"
_NOT_DATA = {
    b"version https://git-lfs": (
        "it is a Git LFS pointer, not the file itself",
        "run: git lfs pull",
    ),
    b"<!doctype html": (
        "it is an HTML page",
        "the download gave a web page; fetch the raw file",
    ),
    b"<html": ("it is an HTML page", "the download gave a web page; fetch the raw file"),
}
"""How files begin that hold something else, in small letters."""


class _UnreadableError(Exception):
    """Why a file cannot be read, as the end of a sentence, and what to do, or None."""


def read_file(path: Path, error: type[QuantizerError], max_unpacked: int | None = None) -> Any:
    """What a tensor file holds: a dict of tensors, or for `.npy` and `.pt/.pth` whatever was
    saved.

    Args:
        max_unpacked: bytes that it may unpack to if it is smaller itself; by default
            `MOST_UNPACKED`.

    Raises:
        error: it cannot be read, or is too large; file and reason are named.
    """
    most = MOST_UNPACKED if max_unpacked is None else max_unpacked
    try:
        _check_is_data(path)
        _check_unpacked(path, most)
        content = READERS[path.suffix.lower()](path)
        _check_size(
            path, max((_size(each) for each in pytree.tree_leaves(content)), default=0), most
        )
        return content
    except _UnreadableError as cause:
        reason, remedy = cause.args
        raise error(f"{path} cannot be read: {reason}", help=remedy) from cause.__cause__
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause


def _check_is_data(path: Path) -> None:
    require_plain(path)
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise _UnreadableError("it is empty", _AGAIN)
    for beginning, why in _NOT_DATA.items():
        if start.lstrip().lower().startswith(beginning):
            raise _UnreadableError(*why)


def _check_unpacked(path: Path, most: int) -> None:
    """Refuse an archive of which little becomes much, before anything is unpacked."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except _ZIP_ERRORS:
        return  # its reader says why
    _check_size(path, size, most)


def _check_size(path: Path, size: int, most: int) -> None:
    held = path.stat().st_size
    if size > max(held, most):
        text = (
            f"it has {in_words(held)} and would unpack to {in_words(size)}, more than "
            f"{in_words(most)}"
        )
        raise _UnreadableError(text, "--max_unpacked allows more, such as --max_unpacked 8GB")


def _size(value: Any) -> int:
    """The bytes of a tensor's values, each for itself: a view may show one as many."""
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)
    except SafetensorError as cause:
        raise _UnreadableError(
            f"it is truncated or not a safetensors file ({cause})", _AGAIN
        ) from cause


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            # About the pickle protocol and TorchScript: what matters is raised below
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as cause:
        raise _why_torch_failed(str(cause)) from cause


def _why_torch_failed(message: str) -> _UnreadableError:
    if blocked := re.search(r"GLOBAL ([\w.]+)", message):
        return _UnreadableError(
            f"it holds the pickled object {blocked[1]}, and loading that could run code",
            "where you trust it, save its weights alone: "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=False).state_dict(), "
            "'weights.safetensors')",
        )
    if "TorchScript" in message:
        return _UnreadableError(
            "it is a TorchScript archive, which is a program",
            "save the state_dict of the Python model",
        )
    if "pickle" in message.lower() or "Weights only load failed" in message:
        return _UnreadableError(
            "it is not a file that torch.save wrote, or it is damaged", _AGAIN
        )
    return _UnreadableError("it is truncated or damaged", _AGAIN)


def _read_npy(path: Path) -> Tensor:
    with path.open("rb") as file:
        return _parse_npy(file)


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except _ZIP_ERRORS as cause:
        raise _UnreadableError(
            f"it is truncated or not an npz archive ({cause})", _AGAIN
        ) from cause
    return {
        name.removesuffix(".npy"): _parse_npy(io.BytesIO(content))
        for name, content in members.items()
    }


def _parse_npy(file: IO[bytes]) -> Tensor:
    """One array in NumPy's format."""
    dtype, fortran_order, shape = _npy_header(file)
    data = bytearray(file.read())
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise _UnreadableError(
            f"it is truncated: {len(data)} bytes of data, {expected} expected", None
        )
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if fortran_order:
        return flat.reshape(shape[::-1]).permute(*range(len(shape) - 1, -1, -1)).contiguous()
    return flat.reshape(shape)


def _npy_header(file: IO[bytes]) -> tuple[torch.dtype, bool, tuple[int, ...]]:
    """dtype, order and shape (numpy.lib.format, versions 1 to 3: magic, header length, a Python
    dict).
    """
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8:
        raise _UnreadableError("it is not a NumPy array file", None)
    length_format = "<H" if magic[6] == 1 else "<I"
    try:
        (length,) = struct.unpack(length_format, file.read(struct.calcsize(length_format)))
        if length > LONGEST_HEADER:
            raise _UnreadableError(
                f"its NumPy header has {length} bytes, more than {LONGEST_HEADER}", None
            )
        header = ast.literal_eval(file.read(length).decode("utf-8").strip())
        descr, fortran_order, shape = (
            str(header["descr"]),
            header["fortran_order"],
            tuple(header["shape"]),
        )
    except (
        struct.error,
        ValueError,
        SyntaxError,
        TypeError,
        KeyError,
        RecursionError,
        MemoryError,
    ) as cause:
        raise _UnreadableError("its NumPy header is damaged", None) from cause
    # True is an int, too, but no size.
    are_sizes = all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape)
    if not are_sizes or not isinstance(fortran_order, bool):
        raise _UnreadableError("its NumPy header is damaged", None)
    if descr not in _NPY_DTYPES:
        raise _UnreadableError(
            f"its dtype {descr!r} has no tensor", f"save it as one of {', '.join(_NPY_DTYPES)}"
        )
    return _NPY_DTYPES[descr], fortran_order, shape


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
    given: Arguments = UNKNOWN,
    max_unpacked: int | None = None,
) -> Iterator[Batch]:
    """Batches of `size` samples. In every tensor, dimension 0 counts the samples; the last
    batch may be smaller.

    A tensor named x, input, images or data is the input, and so is an only one; several others
    are keyword arguments, and beside such an input those that are `given`: what `forward`
    takes. One named y, target, label or labels is the target.
    """
    pending: Named = {}
    for path in paths:
        named = _named_tensors(path, given, max_unpacked)
        pending = _joined(pending, named, path) if pending else named
        while _count(pending) >= size:
            yield _as_batch({name: tensor[:size] for name, tensor in pending.items()}, given)
            pending = {name: tensor[size:] for name, tensor in pending.items()}
    if pending and _count(pending):
        yield _as_batch(pending, given)


def _named_tensors(path: Path, given: Arguments, max_unpacked: int | None) -> Named:
    content: Any = read_file(path, DataError, max_unpacked)
    named = {"x": content} if isinstance(content, Tensor) else content
    if not isinstance(named, Mapping) or not all(
        isinstance(tensor, Tensor) for tensor in named.values()
    ):
        raise DataError(f"{path} holds {a_kind(content)}, not a tensor or a dict of tensors")
    for name, tensor in named.items():
        if (reason := oddity(tensor)) is not None:
            raise DataError(f"{path} cannot be computed with: {name} {reason}", help=PLAIN)
    if not set(named) - set(given.labels):
        raise DataError(
            f"{path} holds no input tensor",
            help=f"name it {', '.join(INPUT_NAMES[:-1])} or {INPUT_NAMES[-1]}",
        )
    held = path.stat().st_size  # nobody has more samples than that of which none has a value
    endless = next(
        (n for n, each in named.items() if not each.numel() and each.shape[:1].numel() > held),
        None,
    )
    if endless is not None:
        raise DataError(
            f"{path} holds no values of {endless}: its shape is {list(named[endless].shape)}"
        )
    counts = {name: list(tensor.shape[:1]) for name, tensor in named.items()}
    if [] in counts.values() or len({count[0] for count in counts.values()}) != 1:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise DataError(f"the tensors of {path} differ in dimension 0, the samples: {listed}")
    return dict(named)


def _joined(first: Named, second: Named, path: Path) -> Named:
    kinds = [
        {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in named.items()}
        for named in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"{path} does not go with the files before it: {_listed(second)} after "
            f"{_listed(first)}"
        )
    return {name: torch.cat([tensor, second[name]]) for name, tensor in first.items()}


def _listed(named: Named) -> str:
    return ", ".join(
        f"{name} {tensor.dtype} {list(tensor.shape[1:])}" for name, tensor in named.items()
    )


def _count(named: Named) -> int:
    return next(iter(named.values())).shape[0]


def _as_batch(named: Named, given: Arguments) -> Batch:
    others = {name: tensor for name, tensor in named.items() if name not in given.labels}
    target = next((named[name] for name in given.labels if name in named), None)
    chosen = next((name for name in INPUT_NAMES if name in others), None)
    inputs = {
        n: tensor
        for n, tensor in others.items()
        if chosen is None or n == chosen or n in given.known
    }
    left_out = tuple(name for name in others if name not in inputs)
    if len(inputs) == 1:
        return replace(Batch.of(next(iter(inputs.values())), target), left_out=left_out)
    first = () if chosen is None or chosen in given.known else (inputs.pop(chosen),)
    return Batch(first, inputs, target, named, left_out)
