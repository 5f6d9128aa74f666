"""Read documents from text files. A `.txt` file is one. In files of rows, each row is one, with
its text or its messages. Rows may name images or have them. A `.parquet` file is read in
another process and within limits.
"""

import base64
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantizer import plugins
from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.sources.json_files import parse_object, read_text
from quantizer.sources.tensor_files import reading
from quantizer.storage.child_process import run_apart
from quantizer.storage.system_calls import require_file_or_folder

TEXT = "text"
MESSAGES = "messages"
_ROWS = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'
_ROLE = "role"
_CONTENT = "content"
_TOOL_CALLS = "tool_calls"
IMAGE = "image"
IMAGES = "images"
_PATH_KEYS = (IMAGE, "path", "url")
"""What has the path of an image in a part of a message."""


@dataclass(frozen=True)
class StoredImage:
    """The content of an image file that is stored in a row of another file.

    Attributes:
        name: for messages of errors.
        content: of the file.
    """

    name: str
    content: bytes


@dataclass(frozen=True)
class Document:
    """A text, or the messages of a chat.

    Attributes:
        place: the file, and the row in it, for messages of errors.
        content: the text, or a list of dicts with `role` and `content`, or `tool_calls`. A part
            that is an image has no path.
        images: the files or their contents, in the order of their places in the content.
    """

    place: str
    content: str | list[Any]
    images: tuple[Path | StoredImage, ...] = ()


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file.

    Raises:
        DataError: the file cannot be read or is empty, a row has neither text nor messages, or
            the package that reads the file is missing.
    """
    read = _READERS.get(path.suffix.lower(), _read_rows)
    with reading(path, DataError):
        require_file_or_folder(path)
        yield from read(path)


def _read_text(path: Path) -> Iterator[Document]:
    text = _decoded(path)
    if not text.strip():
        raise DataError(f"{path} is empty")
    yield Document(str(path), text)


def _read_json_lines(path: Path) -> Iterator[Document]:
    is_empty = True
    for number, line in enumerate(_decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        is_empty = False
        remedy = f"each line must be {_ROWS}"
        row = parse_object(line, path, DataError, remedy=remedy, first_line=number)
        yield _with_images(_document(f"{path}:{number}", row), row, path.parent)
    if is_empty:
        raise DataError(f"{path} is empty")


def _read_rows(path: Path) -> Iterator[Document]:
    rows = plugins.part(f"read rows of {path.suffix.lower()} files")(path)
    for number, row in enumerate(rows, 1):
        yield _with_images(_document(f"{path}, row {number}", row), row, path.parent)
    if not rows:
        raise DataError(f"{path} is empty")


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
}
"""The function that reads the documents of a file, by its suffix. Others have rows."""


def _decoded(path: Path) -> str:
    return read_text(path, DataError).removeprefix("\ufeff")


def _document(place: str, row: Mapping[str, Any]) -> Document:
    """Return the document of a row.

    Raises:
        DataError: it has neither text nor messages.
    """
    text = row.get(TEXT)
    if isinstance(text, str):
        return Document(place, text)
    messages = row.get(MESSAGES)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        # Rows of Parquet have null for what is absent, and a template would write it as None
        content: list[Any] = []
        for message in messages:
            content.append({key: part for key, part in message.items() if part is not None})
        return Document(place, content)
    for name, value in ((TEXT, text), (MESSAGES, messages)):
        if value is not None:
            message = f"{name} of {place} is {a_kind(value)}"
            if isinstance(value, list):
                message = f"{name} of {place} is not a list of dicts with role and content (or "
                message += "tool_calls)"
            raise DataError(message, help=f"each row must be {_ROWS}")
    keys = [key for key, value in row.items() if value is not None]
    raise DataError(
        f"{place} has neither text nor messages, but {', '.join(keys) or 'no value'}",
        help=f"each row must be {_ROWS}",
    )


def _is_message(value: Any) -> bool:
    """Return whether a value has a role, and a content or calls of tools instead."""
    if not isinstance(value, dict) or value.get(_ROLE) is None:
        return False
    return value.get(_CONTENT) is not None or bool(value.get(_TOOL_CALLS))


def _with_images(document: Document, row: Mapping[str, Any], folder: Path) -> Document:
    """Return the document of a row with the images that the row or its messages name.

    Args:
        document: of the row.
        row: with `image`, `images`, or parts of messages that are images.
        folder: that paths are relative to.

    Raises:
        DataError: an image is not named by a path, or both name images.
    """
    place = document.place
    named = row.get(IMAGES) or []
    if not isinstance(named, list):
        raise DataError(f"images of {place} is {a_kind(named)}", help="give a list of paths")
    if row.get(IMAGE) is not None:
        named = [row[IMAGE], *named]
    content = document.content
    if not isinstance(content, str):
        content, in_parts = _without_paths(content)
        if named and in_parts:
            raise DataError(
                f"{place} names images itself and in its messages",
                help='leave out one of them; {"type": "image"} takes the next image of the row',
            )
        named = named or in_parts
    images = tuple(_image(value, place, folder) for value in named)
    return replace(document, content=content, images=images)


def _image(value: Any, place: str, folder: Path) -> Path | StoredImage:
    """Return an image of a row: its path, or its content in the form of `datasets`, which is a
    dict with `bytes` and `path`.

    Raises:
        DataError: it is neither.
    """
    path = value
    if isinstance(value, dict):
        path = value.get("path")
        content = value.get("bytes")
        if isinstance(content, bytes):
            name = f"image {path}" if path else "an image"
            return StoredImage(f"{name} of {place}", content)
    if not isinstance(path, str) or "://" in path:
        raise DataError(
            f"an image of {place} is not the path of a file",
            help="save the image, and give its path relative to the file of rows",
        )
    return folder / path


def _without_paths(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return messages whose images have no paths, and these paths."""
    paths: list[Any] = []
    changed: list[Any] = []
    for message in messages:
        parts = message.get(_CONTENT)
        if isinstance(parts, list):
            parts = [_without_path(part, paths) for part in parts]
            message = {**message, _CONTENT: parts}
        changed.append(message)
    return changed, paths


def _without_path(part: Any, paths: list[Any]) -> Any:
    """Return a part of a message without the path of its image, which is added to `paths`."""
    if not isinstance(part, dict) or part.get("type") != IMAGE:
        return part
    for key in _PATH_KEYS:
        if part.get(key) is not None:
            paths.append(part[key])
    return {"type": IMAGE}


_BASE64 = "base64 of bytes"


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a file.

    Raises:
        DataError: it cannot be read, has neither texts nor messages, or pyarrow is missing.
    """
    if importlib.util.find_spec("pyarrow") is None:
        # Only a missing extra needs it
        from quantizer.installation import pip_line

        raise DataError(
            f"{path} needs the package pyarrow, which is missing", help=pip_line("parquet")
        )
    what = f"reading {path}"
    rows = run_apart(partial(_parquet_rows, path), what, DataError, size=path.stat().st_size)
    return [_with_bytes(row) for row in rows]


def _parquet_rows(path: Path) -> list[Any]:
    """Return the rows of a file. A few bytes can stand for any number of values.

    Raises:
        DataError: the file cannot be read, or has neither texts nor messages.
    """
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows: list[Any] = []
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in (TEXT, MESSAGES) if name in names]
            if not columns:
                raise DataError(
                    f"{path} has no column text or messages, but {', '.join(names)}",
                    help="rename the column of the texts to text",
                )
            columns += [name for name in (IMAGE, IMAGES) if name in names]
            # Threads of a fork's parent are not in the fork
            for batch in file.iter_batches(columns=columns, use_threads=False):
                rows += map(_with_texts, batch.to_pylist())
    except arrow.ArrowException as cause:
        message = f"{path} cannot be read as Parquet: {cause}"
        raise DataError(message) from cause
    return rows


def _with_texts(value: Any) -> Any:
    """Return a value of a row in JSON: bytes become an object with one key."""
    if isinstance(value, bytes):
        return {_BASE64: base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: _with_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(_with_texts, value))
    if isinstance(value, (str, int, float)) or value is None:
        return value
    return str(value)


def _with_bytes(value: Any) -> Any:
    """Return the value that `_with_texts` described."""
    if isinstance(value, list):
        return list(map(_with_bytes, value))
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BASE64}:
        return base64.b64decode(value[_BASE64])
    return {name: _with_bytes(item) for name, item in value.items()}
