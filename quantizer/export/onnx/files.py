"""Stores a model as a file, with its tensors in another one if a protobuf message cannot hold
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import ModelProto

from quantizer.errors import VerificationError, first_line
from quantizer.storage.files import cannot_write, write_bytes

_INVALID_HELP = "the pt2 target writes the same network for torch"
LARGEST_MESSAGE = 2**31 - 2**20
"""Bytes of tensors that fit one message."""


@contextmanager
def stored_model(model: ModelProto, path: Path) -> Iterator[bytes | str]:
    """Yield what a session loads, and write it to `path`, in a new folder.

    That is the serialized model, or its file. Tensors of 2 GB and more go to `<path>.data`.

    Raises:
        ResultError: the file cannot be written.
        VerificationError: it is not valid ONNX.
    """
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_MESSAGE:
        _check(model, path.name)
        content = model.SerializeToString(deterministic=True)
        yield content
        write_bytes(path, content)
        return
    try:
        onnx.save_model(
            model,
            path,
            save_as_external_data=True,
            location=f"{path.name}.data",
            size_threshold=1024,
        )
    except OSError as error:
        raise cannot_write(path, error) from error
    _check(str(path), path.name)
    yield str(path)


def _check(model: ModelProto | str, name: str) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        why = first_line(error)
        raise VerificationError(
            f"{name} is not written: it would be no valid ONNX: {why}", help=_INVALID_HELP
        ) from error
