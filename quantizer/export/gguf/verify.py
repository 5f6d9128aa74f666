"""Loads a GGUF file as its users do, with transformers on the CPU, and compares it with test
mode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor, nn

from quantizer.errors import VerificationError, first_line
from quantizer.export.agreement import Verification, verify
from quantizer.export.gguf.file import Outline
from quantizer.export.transformers_verify import (
    READER_HELP,
    ExpectedCall,
    require_all_keys,
    verify_calls,
)
from quantizer.nn.network import Network
from quantizer.sources.hugging_face.loader import read_checkpoint


@dataclass(frozen=True)
class GgufFile:
    """A file that was written, and the network and the values that it stands for.

    Attributes:
        values: by their names in the model.
        decoded: those of blocks, by the same names, as matrices with a row for each output.
    """

    path: Path
    outline: Outline
    values: Mapping[str, Tensor]
    decoded: Mapping[str, Tensor]
    network: Network
    remarks: tuple[str, ...]


def verify_gguf(
    written: GgufFile, calls: Iterable[ExpectedCall], *, by_template: bool, auto_class: str
) -> Verification:
    """Compare the outputs of a file, loaded by transformers, with test mode's over all calls.

    If transformers cannot load the architecture, the tensors are compared instead, as the
    package gguf reads them. This is so for templates, and for families whose files it does not
    read by itself.

    Args:
        written: the file.
        calls: of the model, with what test mode gives for them.
        by_template: whether the keys are those of a file that an engine has loaded before.

    Raises:
        VerificationError: transformers cannot load or run it, or its outputs differ; or a
            tensor differs.
    """
    file, outline = written.path, written.outline
    dtype = next(iter(written.values.values())).dtype
    settings: dict[str, Any] = {"dtype": dtype, "gguf_file": file.name}
    if outline.config is not None:
        settings["config"] = outline.config

    def load(call: ExpectedCall) -> nn.Module:
        """Return the network that transformers reads from the file, after a first call."""
        module, report = read_checkpoint(file.parent, auto_class, **settings)
        require_all_keys(report, _reader(), file.name)
        module(*call.args, **call.kwargs)
        return module

    try:
        return verify_calls(load, calls, 0.0, file.name, is_exact=True)
    except VerificationError:
        raise
    except Exception as error:
        reason = first_line(error).rstrip(".")
        why = f"{_reader()} cannot run it: {type(error).__name__}: {reason}"
        if not by_template and outline.config is None:
            raise VerificationError(
                f"{file.name} is not written: {why}", help=READER_HELP
            ) from error
    verification = _verify_tensors(written)
    return replace(verification, remarks=(f"{why}; its tensors were compared instead",))


def _verify_tensors(written: GgufFile) -> Verification:
    """Compare each tensor of the model as it is read back, one after the other.

    Raises:
        VerificationError: one differs.
    """
    file = written.path
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, (source, arrangement) in written.outline.tensors.items():
        value = written.values[source]
        if source in written.decoded:
            arranged = arrangement.coded(written.decoded[source], value)
        else:
            arranged = arrangement.values(value)
        decoded = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        # Test mode has decoded values in the dtype of the model
        actual = torch.from_numpy(decoded.copy()).to(arranged.dtype)
        verification = verify("tensors", [arranged.float()], [actual.float()])
        if verification.max_difference:
            text = f"{file.name} is not written: {name}: {verification.figures()}"
            raise VerificationError(text, help=READER_HELP)
    return verification


def _reader() -> str:
    return f"transformers {transformers.__version__} with gguf"
