"""Read and write JSON files, safetensors files and others, each whole or not at all."""

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

_AGAIN = "run --quant_mode calib again"
_WORDS = 1 << 14
"""So many words of JSON are encoded at once."""
_MAX_REASON = 200


def write_bytes(path: Path, content: bytes | Iterable[bytes]) -> str:
    """Write a file atomically, perhaps part by part, and return its sha256.

    Raises:
        ResultError: the folder cannot be written or the disk is full. A crash leaves the old
            file or the new one.
    """
    digest = hashlib.sha256()
    parts = [content] if isinstance(content, bytes) else content

    def hashed() -> Iterator[bytes]:
        for part in parts:
            digest.update(part)
            yield part

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, hashed())
    except OSError as error:
        raise cannot_write(path, error) from error
    return digest.hexdigest()


def cannot_write(path: Path, error: OSError) -> ResultError:
    """Return the error for a file or folder that the system refused to write. For a full disk
    it says how much is free.
    """
    text = f"cannot write {path}: {error.strerror or error}"
    help_ = "choose another place"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        text += f", {in_words(free)} are free"
        help_ = "choose another place or free some space"
    return ResultError(text, help=help_)


def write_text(path: Path, text: str) -> str:
    """Write a text in UTF-8, and return its sha256.

    Bytes of a file's name that are not UTF-8 are written as escapes.
    """
    return write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> str:
    """Write JSON with sorted keys, indented by two spaces, and return its sha256."""
    return write_bytes(path, json_parts(value))


def json_parts(value: Any, *, sort_keys: bool = True) -> Iterator[bytes]:
    """Yield JSON part by part: a list of all its words would take twenty times as much memory
    as the text.
    """
    encoder = json.JSONEncoder(indent=2, sort_keys=sort_keys, ensure_ascii=False)
    words = encoder.iterencode(value)
    while text := "".join(itertools.islice(words, _WORDS)):
        # A byte of a file's name that is not UTF-8 becomes one of JSON's escapes.
        yield text.encode(errors="backslashreplace")
    yield b"\n"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file tensor by tensor, and return its sha256, which depends on the
    arguments alone.
    """
    return write_bytes(path, safetensors_parts(tensors, metadata))


def read_json(place: Path | OpenFile) -> Any:
    """Return the content of a JSON file.

    Raises:
        ResultError: the file is missing or not JSON.
    """
    return _parsed(place, _parse_json, "JSON")


def _parse_json(file: OpenFile) -> Any:
    """Parse strict JSON: without NaN and infinity, for which results have null, and without
    halves of surrogate pairs, except those that stand for bytes of a file's name.
    """
    text = file.content().decode()
    value = json.loads(text, parse_constant=_refuse)
    # Only escapes can be halves.
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"it holds {constant}")


def read_tensors(place: Path | OpenFile) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ResultError: the file is missing or damaged.
    """
    tensors: dict[str, Tensor] = _parsed(
        place, lambda file: load(file.content()), "safetensors"
    )
    return tensors


def deferred_tensors(place: Path | OpenFile) -> dict[str, DeferredTensor]:
    """Return the tensors of a safetensors file, each read when it is needed.

    Raises:
        ResultError: the file is missing or damaged.
    """
    tensors: dict[str, DeferredTensor] = _parsed(place, deferred_file, "safetensors")
    return tensors


def sha256(path: Path) -> str:
    """Return the digest of a file of any size.

    Raises:
        ResultError: the file cannot be read.
    """
    try:
        return _opened(path).digest()
    except OSError as error:
        raise cannot_read(path, error) from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        ResultError: the file cannot be read.
    """
    try:
        return _opened(path).content()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> ResultError:
    """Return the error for a file that the system refuses to read."""
    return ResultError(f"cannot read {path}: {error.strerror or error}", help=_AGAIN)


def _opened(place: Path | OpenFile) -> OpenFile:
    if isinstance(place, OpenFile):
        return place
    require_plain(place)
    return OpenFile.at(place)


def _parsed(
    place: Path | OpenFile,
    parse: Callable[[OpenFile], Any],
    kind: str,
) -> Any:
    path = place if isinstance(place, Path) else place.path
    try:
        return parse(_opened(place))
    except FileNotFoundError:
        help_ = "run --quant_mode calib first, with the same --output_dir"
        raise ResultError(f"{path} does not exist", help=help_) from None
    except OSError as error:
        raise cannot_read(path, error) from error
    except Exception as error:
        # Parsers raise many classes of errors.
        text = f"{path} is not a readable {kind} file: {error}"
        raise ResultError(text, help=_AGAIN) from error


def damaged(path: Path | str, where: str, why: str) -> ResultError:
    """Return the error about a place in a file. A long reason is cut."""
    if len(why) > _MAX_REASON:
        why = f"{why[:_MAX_REASON]}…"
    return ResultError(f"{path} is damaged: {where}: {why}", help=_AGAIN)
