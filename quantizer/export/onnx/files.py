"""Stores a model as a file, with its tensors in another one if a protobuf message cannot hold
them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import ModelProto

from quantizer.errors import VerificationError, first_line
from quantizer.storage.files import cannot_write, write_bytes

_INVALID_HELP = "the pt2 target writes the same network for torch"
LARGEST_MESSAGE = 2**31 - 2**20
"""Bytes of tensors that fit one message."""


@contextmanager
def stored_model(model: ModelProto, path: Path) -> Iterator[bytes | str]:
    """Yield what a session loads, and publish it at `path` at the end.

    That is the serialized model, or a file of a temporary folder. Nothing is published if the
    body raises. Tensors of 2 GB and more go to `<path>.data`.

    Raises:
        ResultError: the file cannot be written.
        VerificationError: it is not valid ONNX.
    """
    data = path.with_name(f"{path.name}.data")
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_MESSAGE:
        _check(model, path.name)
        content = model.SerializeToString(deterministic=True)
        yield content
        write_bytes(path, content)
        data.unlink(missing_ok=True)
        return
    try:
        yield from _with_data_file(model, path, data)
    except OSError as error:
        raise cannot_write(path, error) from error


def _check(model: ModelProto | str, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        why = first_line(error)
        raise VerificationError(
            f"{name} is not written: it would be no valid ONNX: {why}", help=_INVALID_HELP
        ) from error


def _with_data_file(model: ModelProto, path: Path, data: Path) -> Iterator[str]:
    """Yield a file that has its tensors in another one, and publish both.

    Raises:
        OSError: the two cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".onnx-") as folder:
        file = Path(folder) / path.name
        onnx.save_model(
            model, file, save_as_external_data=True, location=data.name, size_threshold=1024
        )
        _check(str(file), path.name)
        yield str(file)
        # Never the new data beside the old model.
        path.unlink(missing_ok=True)
        os.replace(file.with_name(data.name), data)
        os.replace(file, path)
