"""Files of a result folder, JSON and safetensors, each whole or not there; and the folder's lock."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor

from quantizer.atomic import replace_file
from quantizer.errors import ResultError


def write_bytes(path: Path, content: bytes) -> str:
    """Write atomically and return the content's sha256; a crash leaves the old file or the new one.

    Raises:
        ResultError: the folder cannot be written or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ResultError(
            f"cannot write {path}: {error.strerror or error}", help="choose another --output_dir or free some space"
        ) from error
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, value: Any) -> str:
    """Sorted keys, two spaces, one newline at the end."""
    return write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """A safetensors file; its bytes depend on the tensors alone."""
    contents = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    # safetensors.torch.save would do the same, but only where numpy is installed.
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.element_size(),
        )
        for name, tensor in contents.items()
    }
    return write_bytes(path, serialize(specs, metadata=dict(metadata) if metadata else None))


def read_json(path: Path) -> Any:
    """The parsed file.

    Raises:
        ResultError: missing or not JSON.
    """
    return _parsed(path, lambda content: json.loads(content.decode()), "JSON")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ResultError: missing or damaged.
    """
    tensors: dict[str, Tensor] = _parsed(path, load, "safetensors")
    return tensors


def _parsed(path: Path, parse: Callable[[bytes], Any], kind: str) -> Any:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(
            f"{path} does not exist", help="run --quant_mode calib first, with the same --output_dir"
        ) from None
    except Exception as error:  # of whatever class the parser has
        raise ResultError(
            f"{path} is not a readable {kind} file: {error}", help="run --quant_mode calib again"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process ends in whatever way.

    Raises:
        ResultError: another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ResultError(
            f"cannot use {folder} for results: {error.strerror}", help="choose another --output_dir"
        ) from error
    try:
        _take(handle, folder)
        try:
            yield
        finally:
            (folder / ".lock").unlink(missing_ok=True)
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    """Lock the open file, if it is still the folder's: its last owner may have removed it in the meantime."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owned = os.fstat(handle).st_ino == (folder / ".lock").stat().st_ino
    except OSError:
        owned = False
    if not owned:
        raise ResultError(f"{folder} is in use by another run", help="wait for it or choose another --output_dir")
