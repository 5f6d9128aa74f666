"""Read JSON files, safetensors files and others, and write each completely or not at all.
Errors are sentences for the user.

Tensors may be in several files of limited size (shards) with an index, as transformers names
them.
"""

import errno
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load
from torch import Tensor

from quantizer.errors import ResultError
from quantizer.printable import printable_json
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.opened_files import OpenedFiles, OpenFile
from quantizer.storage.process_memory import size_text
from quantizer.storage.replacing import replace_file
from quantizer.storage.safetensors_file import deferred_file, safetensors_parts
from quantizer.storage.system_calls import require_file_or_folder

_Value = TypeVar("_Value")
_CALIBRATE_AGAIN = "run <--quant_mode calib> again"
MAX_SHARD_BYTES = 5 * 10**9
"""The most bytes of tensors in one file. A larger tensor has a file of its own."""
_JSON_TOKENS_PER_PART = 1 << 14
"""How many tokens of JSON are joined before they are written."""
_MAX_REASON_LENGTH = 200


def write_bytes(path: Path, content: bytes | Iterable[bytes]) -> str:
    """Write a file as `replace_file` does, and return its sha256. A missing folder is made.

    Args:
        path: the file.
        content: the bytes, or their parts in order.

    Raises:
        UsageError: the file is not quantizer's, and may not be replaced.
        ResultError: the folder cannot be written or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> ResultError:
    """Return the error for a file or folder that the system refused to write. If the disk is
    full, it says how much space is free.
    """
    text = f"cannot write {path}: {error.strerror or error}"
    help_ = "choose another place"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        text += f", {size_text(free)} are free"
        help_ = "choose another place or free some space"
    return ResultError(text, help=help_)


def write_text(path: Path, text: str) -> str:
    """Write a text in UTF-8, and return its sha256."""
    # A text may have a file name whose bytes are not UTF-8: Python has them as lone surrogates
    return write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, value: Any) -> str:
    """Write JSON with sorted keys, indented by two spaces, and return its sha256."""
    return write_bytes(path, json_parts(value))


def json_parts(value: Any, *, sort_keys: bool = True) -> Iterator[bytes]:
    """Yield indented JSON part by part. Python's encoder would make a list of all tokens first,
    which takes twenty times as much memory as the text.
    """
    encoder = json.JSONEncoder(indent=2, sort_keys=sort_keys, ensure_ascii=False)
    tokens = encoder.iterencode(value)
    while text := "".join(itertools.islice(tokens, _JSON_TOKENS_PER_PART)):
        # Names must not control a terminal, and lone surrogates have no bytes
        if not text.replace("\n", "").isprintable():
            text = printable_json(text)
        yield text.encode()
    yield b"\n"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file tensor by tensor, and return its sha256. Equal tensors and
    metadata give equal files.
    """
    return write_bytes(path, safetensors_parts(tensors, metadata))


def read_json(place: Path | OpenFile) -> Any:
    """Return the content of a JSON file.

    Raises:
        ResultError: the file is missing or not JSON.
    """
    return _parse_file(place, _parse_json, "JSON")


def _parse_json(file: OpenFile) -> Any:
    """Return the value of a JSON file, if it is strict JSON that `json_parts` could have
    written.

    Raises:
        ValueError: it is not JSON. It has NaN or infinity, for which we write null. Or it has
            lone surrogates other than those that stand for bytes of file names.
    """
    text = file.content().decode()
    value = json.loads(text, parse_constant=_refuse_constant)
    # A lone surrogate can only come from an escape
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    return value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"it holds {constant}")


def read_tensors(place: Path | OpenFile) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        ResultError: the file is missing or damaged.
    """
    return _parse_file(place, lambda file: load(file.content()), "safetensors")


def deferred_tensors(place: Path | OpenFile) -> dict[str, DeferredTensor]:
    """Return the tensors of a safetensors file. Each is read when it is needed.

    Raises:
        ResultError: the file is missing or damaged.
    """
    return _parse_file(place, deferred_file, "safetensors")


def sha256(path: Path) -> str:
    """Return the sha256 of a file.

    Raises:
        ResultError: the file cannot be read.
    """
    try:
        return _open_file(path).digest()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> ResultError:
    """Return the error for a file that the system refuses to read."""
    return ResultError(f"cannot read {path}: {error.strerror or error}", help=_CALIBRATE_AGAIN)


def _open_file(place: Path | OpenFile) -> OpenFile:
    """Return an open file as it is, or open a path.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
    """
    if isinstance(place, OpenFile):
        return place
    require_file_or_folder(place)
    return OpenFile.open(place)


def _parse_file(
    place: Path | OpenFile, parse: Callable[[OpenFile], _Value], kind: str
) -> _Value:
    """Return `parse(file)`.

    Args:
        place: the file, or its path.
        parse: may raise any error.
        kind: names the format in errors.

    Raises:
        ResultError: the file is missing, unreadable, or `parse` has raised an error.
    """
    path = place if isinstance(place, Path) else place.path
    try:
        return parse(_open_file(place))
    except FileNotFoundError:
        help_ = "run <--quant_mode calib> first, with the same <--output_dir>"
        raise ResultError(f"{path} does not exist", help=help_) from None
    except OSError as error:
        raise cannot_read(path, error) from error
    except Exception as error:
        # Parsers raise many classes of errors for damaged files
        text = f"{path} is not a readable {kind} file: {error}"
        raise ResultError(text, help=_CALIBRATE_AGAIN) from error


def damaged(path: Path | str, where: str, why: str) -> ResultError:
    """Return the error about a damaged file.

    Args:
        path: the file.
        where: the place in it.
        why: what is wrong there. A long text is cut off.
    """
    if len(why) > _MAX_REASON_LENGTH:
        why = f"{why[:_MAX_REASON_LENGTH]}…"
    return ResultError(f"{path} is damaged: {where}: {why}", help=_CALIBRATE_AGAIN)


def write_shards(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write tensors to `path`, or to shards and an index if they exceed `MAX_SHARD_BYTES`.

    Returns:
        The sha256 of each file, by its name.

    Raises:
        ResultError: the folder cannot be written or the disk is full.
    """
    shards = _split(tensors)
    if len(shards) == 1:
        digest = write_tensors(path, tensors, metadata)
        return {path.name: digest}
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(path.name, number, len(shards))
        shard_path = path.with_name(name)
        digests[name] = write_tensors(shard_path, shard, metadata)
        weight_map |= dict.fromkeys(shard, name)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    index_path = path.with_name(_index_name(path.name))
    digests[index_path.name] = write_json(index_path, index)
    return digests


def tensor_files_and_index(name: str, files: Iterable[str]) -> list[str]:
    """Return the names among `files` of the file `name` and of its shards.

    The name of their index follows, whether there is one or not.
    """
    shards = tensor_files_of(name, files)
    return [*shards, _index_name(name)]


def deferred_shards(name: str, opened: OpenedFiles) -> dict[str, DeferredTensor]:
    """Return the tensors that `write_shards` wrote for `name`. Each is read when it is needed.

    Raises:
        ResultError: a file is damaged.
    """
    tensors: dict[str, DeferredTensor] = {}
    for shard in tensor_files_of(name, opened.names):
        tensors |= deferred_tensors(opened[shard])
    return tensors


def shard_name(name: str, number: int, count: int) -> str:
    """Return the name of one of `count` shards of `name`, numbered from 1.

    >>> shard_name("weights.safetensors", 1, 12)
    'weights-00001-of-00012.safetensors'
    """
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{number:05}-of-{count:05}.{suffix}"


def tensor_files_of(name: str, files: Iterable[str]) -> list[str]:
    """Return the names among `files` of the file `name` and of its shards, sorted.

    >>> tensor_files_of(
    ...     "a.safetensors",
    ...     ["a-00002-of-00002.safetensors", "a-00001-of-00002.safetensors", "b.safetensors"],
    ... )
    ['a-00001-of-00002.safetensors', 'a-00002-of-00002.safetensors']
    """
    stem, _, suffix = name.rpartition(".")
    before = re.escape(stem)
    after = re.escape(f".{suffix}")
    pattern = re.compile(before + r"(-\d{5}-of-\d{5})?" + after)
    return sorted(filter(pattern.fullmatch, files))


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Distribute tensors over shards, in the order of their names."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    return shards


def _index_name(name: str) -> str:
    """Return the name of the index of the shards of `name`."""
    return f"{name}.index.json"
