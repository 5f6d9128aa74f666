"""Loads a GGUF file as its users do, with transformers on the CPU, and compares it with test
mode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import torch
import transformers
from torch import Tensor, nn

from quantizer.errors import VerificationError
from quantizer.export.agreement import Verification, verify
from quantizer.export.gguf.file import Outline
from quantizer.export.transformers_verify import (
    READER_HELP,
    ExpectedCall,
    require_all_keys,
    verify_calls,
)
from quantizer.sources.hugging_face import read_checkpoint

_AUTO = "AutoModelForCausalLM"


def verify_gguf(
    file: Path,
    outline: Outline,
    values: Mapping[str, Tensor],
    calls: Iterable[ExpectedCall],
    *,
    by_template: bool,
) -> Verification:
    """Compare the outputs of a file, loaded by transformers, with test mode's over all calls.

    If transformers cannot load the architecture of a template, the tensors are compared
    instead, as the package gguf reads them.

    Args:
        outline: what the file was written by.
        values: those of test mode's parameters, by their names in the model.
        by_template: whether the keys are those of a file that an engine has loaded before.

    Raises:
        VerificationError: transformers cannot load or run it, or its outputs differ; or a
            tensor differs.
    """
    dtype = next(iter(values.values())).dtype

    def load(call: ExpectedCall) -> nn.Module:
        module, report = read_checkpoint(file.parent, _AUTO, gguf_file=file.name, dtype=dtype)
        require_all_keys(report, _reader(), file.name)
        module(*call.args, **call.kwargs)
        return module

    try:
        return verify_calls(load, calls, 0.0, file.name, is_exact=True)
    except VerificationError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        why = f"{_reader()} cannot run it: {type(error).__name__}: {first_line}"
        if not by_template:
            raise VerificationError(
                f"{file.name} is not written: {why}", help=READER_HELP
            ) from error
    verification = _verify_tensors(file, outline, values)
    return replace(verification, remarks=(f"{why}; its tensors were compared instead",))


def _verify_tensors(file: Path, outline: Outline, values: Mapping[str, Tensor]) -> Verification:
    """Compare each tensor of the model as it is read back.

    Raises:
        VerificationError: they differ.
    """
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    expected: list[Tensor] = []
    actual: list[Tensor] = []
    for name, (source, arrangement) in outline.tensors.items():
        expected.append(arrangement.values(values[source]).float())
        decoded = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        actual.append(torch.from_numpy(decoded.copy()))
    verification = verify("tensors", expected, actual)
    if verification.max_difference:
        text = f"{file.name} is not written: {verification.figures()}"
        raise VerificationError(text, help=READER_HELP)
    return verification


def _reader() -> str:
    return f"transformers {transformers.__version__} with gguf"
