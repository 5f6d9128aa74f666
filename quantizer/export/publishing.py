"""Moves what an exporter has written to the user's folder, when it is verified."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quantizer.export.exporter import Exporter
from quantizer.export.hugging_face_folder import source_folder
from quantizer.storage.files import cannot_write
from quantizer.storage.permission import replacing
from quantizer.storage.replacing import (
    replaced_files,
    replaced_folder,
    require_replaceable_folder,
    require_writable,
)


def require_place(exporter: Exporter[Any], path: Path) -> None:
    """Check before work begins that what an exporter writes to a path replaces no file of the
    user's.

    Raises:
        UsageError: naming the file.
        ResultError: what is there cannot be read.
    """
    try:
        if exporter.writes_folder:
            require_replaceable_folder(path)
            return
        for file in exporter.files(path):
            require_writable(file)
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def new_files(exporter: Exporter[Any], path: Path, model: nn.Module | None) -> Iterator[Path]:
    """Yield where an exporter writes. What it has written replaces the earlier export at `path`
    at the end of the `with` block.

    Args:
        exporter: of the target.
        path: of its file or folder.
        model: the float model, whose own folder is never replaced.

    Raises:
        UsageError: what is at `path` is not an earlier export.
        ResultError: it cannot be written.
    """
    replaced = replaced_files(path, exporter.files(path))
    if exporter.writes_folder:
        replaced = replaced_folder(path)
    source = None if model is None else source_folder(model)
    inputs = [] if source is None else [source]
    try:
        with replacing(inputs=inputs), replaced as new_path:
            yield new_path
    except OSError as error:
        raise cannot_write(path, error) from error
