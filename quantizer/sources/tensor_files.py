"""Reads named tensors from `.safetensors`, `.pt/.pth`, `.npy` and `.npz` files. Never unpickles code, never falls back.

numpy is not needed. Unreadable files are told apart: empty, Git LFS pointer, HTML page, truncated, pickled code.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quantizer.errors import QuantizerError

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


class _UnreadableError(Exception):
    """Why a file cannot be read, as the end of a sentence, and what to do."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def read_file(path: Path, error: type[QuantizerError]) -> Any:
    """What a tensor file holds: a dict of tensors, or for `.npy` and `.pt/.pth` whatever was saved.

    Raises `error` with the file and the reason if it cannot be read.
    """
    try:
        _check_is_data(path)
        return READERS[path.suffix.lower()](path)
    except _UnreadableError as cause:
        raise error(f"{path} cannot be read: {cause.reason}", help=cause.remedy) from cause.__cause__
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause.strerror or cause}") from cause


def _check_is_data(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise _UnreadableError("it is empty", "copy or download it again")
    if start.startswith(b"version https://git-lfs"):
        raise _UnreadableError("it is a Git LFS pointer, not the file itself", "run: git lfs pull")
    if start.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        raise _UnreadableError("it is an HTML page", "the download gave a web page; fetch the raw file")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as cause:
        raise _UnreadableError(
            f"it is truncated or not a safetensors file ({cause})", "copy or download it again"
        ) from cause


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle protocol and TorchScript: what matters is raised below
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
            "safetensors.torch.save_file(torch.load(FILE, weights_only=False).state_dict(), 'weights.safetensors')",
        )
    if "TorchScript" in message:
        return _UnreadableError(
            "it is a TorchScript archive, which is a program", "save the state_dict of the Python model"
        )
    if "pickle" in message.lower() or "Weights only load failed" in message:
        return _UnreadableError("it is not a file that torch.save wrote, or it is damaged", "copy or download it again")
    return _UnreadableError("it is truncated or damaged", "copy or download it again")


def _read_npy(path: Path) -> Tensor:
    with path.open("rb") as file:
        return _parse_npy(file)


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy"): _parse_npy(archive.open(name)) for name in archive.namelist()}  # type: ignore[arg-type]
    except (zipfile.BadZipFile, EOFError) as cause:
        raise _UnreadableError(
            f"it is truncated or not an npz archive ({cause})", "copy or download it again"
        ) from cause


def _parse_npy(file: BinaryIO) -> Tensor:
    """One array of NumPy's format (numpy.lib.format, versions 1-3): magic, header length, a Python dict, the bytes."""
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8:
        raise _UnreadableError("it is not a NumPy array file")
    length_format = "<H" if magic[6] == 1 else "<I"
    try:
        (length,) = struct.unpack(length_format, file.read(struct.calcsize(length_format)))
        header = ast.literal_eval(file.read(length).decode("utf-8").strip())
        descr, fortran_order, shape = header["descr"], header["fortran_order"], tuple(header["shape"])
        dtype = _NPY_DTYPES.get(descr)
        count = math.prod(shape)
    except (struct.error, ValueError, SyntaxError, TypeError, KeyError, RecursionError) as cause:
        raise _UnreadableError("its NumPy header is damaged") from cause
    if dtype is None:
        raise _UnreadableError(f"its dtype {descr!r} has no tensor", f"save it as one of {', '.join(_NPY_DTYPES)}")
    data = bytearray(file.read())
    if len(data) != count * dtype.itemsize:
        raise _UnreadableError(f"it is truncated: {len(data)} bytes of data, {count * dtype.itemsize} expected")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if fortran_order:
        return flat.reshape(shape[::-1]).permute(*range(len(shape) - 1, -1, -1)).contiguous()
    return flat.reshape(shape)


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".npy": _read_npy,
    ".npz": _read_npz,
}
