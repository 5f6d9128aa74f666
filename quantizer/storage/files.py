"""Files of a result folder, JSON and safetensors, each whole or not there."""

import errno
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from quantizer.errors import ResultError
from quantizer.storage.atomic_write import replace_file
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.opened_files import OpenFile
from quantizer.storage.plain_files import require_plain
from quantizer.storage.process_memory import in_words
from quantizer.storage.safetensors_file import deferred_file, safetensors_parts


def write_bytes(path: Path, content: bytes | Iterable[bytes]) -> str:
    """Write atomically, part by part if there are several, and return the sha256; a crash
    leaves the old file or the new one.

    Raises:
        ResultError: the folder cannot be written or the disk is full.
    """
    digest = hashlib.sha256()

    def counted() -> Iterator[bytes]:
        for part in [content] if isinstance(content, bytes) else content:
            digest.update(part)
            yield part

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, counted())
    except OSError as error:
        raise cannot_write(path, error) from error
    return digest.hexdigest()


def cannot_write(path: Path, error: OSError) -> ResultError:
    """What to say of a file or folder that the system refused to write; of a full disk, how
    much of it is free.
    """
    free, help_ = "", "choose another place"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(each for each in path.absolute().parents if each.exists())
        free, help_ = (
            f", {in_words(shutil.disk_usage(place).free)} are free",
            "choose another place or free some space",
        )
    return ResultError(f"cannot write {path}: {error.strerror or error}{free}", help=help_)


def write_text(path: Path, text: str) -> str:
    """In UTF-8, with escapes for bytes of file names that are none."""
    return write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> str:
    """Sorted keys, two spaces, one newline at the end."""
    return write_bytes(path, json_parts(value))


def json_parts(value: Any, *, sort_keys: bool = True) -> Iterator[bytes]:
    """The text part by part: a list of its words takes twenty times as much memory."""
    encoder = json.JSONEncoder(indent=2, sort_keys=sort_keys, ensure_ascii=False)
    words = encoder.iterencode(value)
    while text := "".join(itertools.islice(words, CHUNK >> 6)):
        yield text.encode(
            errors="backslashreplace"
        )  # a byte of a file's name that is no UTF-8 is one of JSON's escapes
    yield b"\n"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """A safetensors file, written tensor by tensor; its bytes depend on the tensors alone."""
    return write_bytes(path, safetensors_parts(tensors, metadata))


def read_json(place: Path | OpenFile) -> Any:
    """The parsed file.

    Raises:
        ResultError: missing or not JSON.
    """
    return _parsed(place, _json, "JSON")


def _json(place: Path | OpenFile) -> Any:
    """No result has NaN or infinity in it, what is not finite is null; nor halves of
    characters, but for those that stand for bytes of a file's name.
    """
    text = _content(place).decode()
    value = json.loads(text, parse_constant=_refuse)
    if "\\ud" in text.lower():  # written as escapes, which alone can be halves
        json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    return value


def _content(place: Path | OpenFile) -> bytes:
    return place.read_bytes() if isinstance(place, Path) else place.content()


def _refuse(constant: str) -> Any:
    raise ValueError(f"it holds {constant}")


def read_tensors(place: Path | OpenFile) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ResultError: missing or damaged.
    """
    tensors: dict[str, Tensor] = _parsed(
        place, lambda file: load(_content(file)), "safetensors"
    )
    return tensors


def deferred_tensors(place: Path | OpenFile) -> dict[str, DeferredTensor]:
    """The tensors of a safetensors file, each read when it is needed.

    Raises:
        ResultError: missing or damaged.
    """
    tensors: dict[str, DeferredTensor] = _parsed(place, deferred_file, "safetensors")
    return tensors


def sha256(path: Path) -> str:
    """Return the digest of a file of any size.

    Raises:
        ResultError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        require_plain(path)
        with path.open("rb") as file:
            while part := file.read(CHUNK):
                digest.update(part)
    except OSError as error:
        raise cannot_read(path, error) from error
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        ResultError: it cannot be read.
    """
    try:
        require_plain(path)
        return path.read_bytes()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> ResultError:
    """Return what to say of a file that the system refuses to read."""
    return ResultError(f"cannot read {path}: {error.strerror or error}", help=AGAIN)


CHUNK = 1 << 20
AGAIN = "run --quant_mode calib again"


def _parsed(place: Path | OpenFile, parse: Callable[[Any], Any], kind: str) -> Any:
    path = place if isinstance(place, Path) else place.path
    try:
        if isinstance(place, Path):
            require_plain(place)
        return parse(place)
    except FileNotFoundError:
        help_ = "run --quant_mode calib first, with the same --output_dir"
        raise ResultError(f"{path} does not exist", help=help_) from None
    except OSError as error:
        raise cannot_read(path, error) from error
    except Exception as error:  # of whatever class the parser has
        help_ = "run --quant_mode calib again"
        raise ResultError(
            f"{path} is not a readable {kind} file: {error}", help=help_
        ) from error


def damaged(path: Path | str, where: str, why: str) -> ResultError:
    """The error about a place in a file; long values are cut."""
    short = why if len(why) <= 200 else f"{why[:200]}…"
    return ResultError(f"{path} is damaged: {where}: {short}", help=AGAIN)
