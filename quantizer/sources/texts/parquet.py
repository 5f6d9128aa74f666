"""Read the rows of a `.parquet` file, in another process and within limits."""

import base64
import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

from quantizer.errors import DataError, pip_line
from quantizer.sources.texts.documents import IMAGE, IMAGES, MESSAGES, TEXT
from quantizer.storage.child_process import run_apart

_BASE64 = "base64 of bytes"


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a file.

    Raises:
        DataError: it cannot be read, has neither texts nor messages, or pyarrow is missing.
    """
    if importlib.util.find_spec("pyarrow") is None:
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
