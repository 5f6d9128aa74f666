"""Loads a checkpoint as its users do, with transformers on the CPU, and compares it with test
mode.
"""

import json
import linecache
import re
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compressed_tensors
import transformers
from torch import nn

from quantizer.errors import VerificationError, first_line
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import CompressedCheckpoint
from quantizer.export.compressed_tensors.schemes import (
    MXFP4_FORMAT,
    MXFP8_FORMAT,
    NVFP4_FORMAT,
    PACKED_FORMAT,
)
from quantizer.export.stored_weights import is_symmetric
from quantizer.export.transformers_verify import (
    READER_HELP,
    ExpectedCall,
    require_all_keys,
    verify_calls,
)
from quantizer.sources.files.json_files import CONFIG_FILE
from quantizer.sources.hugging_face.loader import read_checkpoint

_WEIGHT_ACCESS = re.compile(r"\b(self|module)\.(?:([\w.]+)\.)?weight\b")
_NOT_PACKED_HELP = (
    "leave such layers in float, or quantize weights and inputs to 8 bits, which are not "
    "packed; <--deploy pt2 and safetensors> need no such reader"
)
# Readers compute these in bfloat16.
_BFLOAT16_FORMATS = (MXFP4_FORMAT, MXFP8_FORMAT, NVFP4_FORMAT)


def verify_folder(
    folder: Path,
    checkpoint: CompressedCheckpoint,
    calls: Iterable[ExpectedCall],
    *,
    sqnr_db: float,
    name: str,
) -> Verification:
    """Compare the outputs of a folder, loaded by transformers, with test mode's.

    Args:
        checkpoint: what the folder holds.
        sqnr_db, name: as for `verify_calls`.

    Raises:
        VerificationError: transformers cannot load or run it, or its outputs differ.
    """
    remarks: tuple[str, ...] = ()

    def load(call: ExpectedCall) -> nn.Module:
        nonlocal remarks
        module, remarks = _loaded(folder, checkpoint, call, name)
        return module

    # The values of mxfp4 and mxfp8 need no rounding.
    is_rounded = any(layer.format == NVFP4_FORMAT for layer in checkpoint.layers.values())
    is_exact = checkpoint.is_weight_only and not is_rounded
    verification = verify_calls(load, calls, sqnr_db, name, is_exact=is_exact)
    of_checkpoint = (*checkpoint.remarks, *checkpoint.head_remarks)
    return replace(verification, remarks=(*of_checkpoint, *remarks))


def _loaded(
    folder: Path, checkpoint: CompressedCheckpoint, call: ExpectedCall, name: str
) -> tuple[nn.Module, tuple[str, ...]]:
    """Load with a plain `from_pretrained` or, if this reader cannot, with dequantized weights.

    The latter leaves inputs in float and reads all layers as it reads the first, so it only
    works for checkpoints that are weight-only and have one scheme.
    """
    try:
        return _run(folder, checkpoint, call, name), ()
    except VerificationError:
        raise
    except Exception as error:
        layer = _layer_without_weight(error)
        why = first_line(error)
        problem = f"cannot run it: {type(error).__name__}: {why}"
        remedy = _remedy(checkpoint)
        cause = _cause(checkpoint)
        if layer is not None:
            reads = f"the model's code reads the weight of {layer}, which is packed"
            problem = f"cannot load it: {reads}"
            remedy = _NOT_PACKED_HELP
            cause = f"{_reader()} does not load it by default, as {reads}"
        refusal = VerificationError(
            f"{name} is not written: {_reader()} {problem}", help=remedy
        )
        if len(checkpoint.schemes) > 1 or not checkpoint.is_weight_only or cause is None:
            raise refusal from error
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    remark = (
        f"{cause}: load it with quantization_config=CompressedTensorsConfig(dequantize=True), "
        f"or {remedy}"
    )
    try:
        module = _run(folder, checkpoint, call, name, quantization_config=settings)
    except Exception as error:
        if layer is None:
            raise
        raise refusal from error
    return module, (remark,)


def _layer_without_weight(error: Exception) -> str | None:
    """Return the layer whose weight the code of a model reads, if that is why loading fails.

    Packed layers have no such tensor until their first call.
    """
    if not isinstance(error, AttributeError) or error.name != "weight":
        return None
    layer = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = linecache.getline(frame.f_code.co_filename, line)
        access = _WEIGHT_ACCESS.search(code)
        if access is not None:
            owner, path = access.groups()
            holder = type(frame.f_locals.get(owner)).__name__
            layer = f"{holder}.{path}" if path else holder
    return layer


def _run(
    folder: Path,
    checkpoint: CompressedCheckpoint,
    call: ExpectedCall,
    name: str,
    **settings: Any,
) -> nn.Module:
    """Return the folder's model after a first call, which unpacks the weights.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    architectures = config.get("architectures") or ["AutoModel"]
    module, report = read_checkpoint(folder, architectures[0], **settings)
    require_all_keys(report, _reader(), name, checkpoint.unused)
    module(*call.args, **call.kwargs)
    return module


def _cause(checkpoint: CompressedCheckpoint) -> str | None:
    """Return why this reader may not load by default a checkpoint that others load."""
    formats: set[str] = set()
    for layer in checkpoint.layers.values():
        if layer.format == PACKED_FORMAT and not is_symmetric(layer.weight.spec):
            return f"{_reader()} does not load packed asymmetric weights by default"
        if layer.format in _BFLOAT16_FORMATS:
            formats.add(layer.format.partition("-")[0])
    if not formats:
        return None
    names = " and ".join(sorted(formats))
    return f"{_reader()} computes {names} in bfloat16, and the model is in another dtype"


def _remedy(checkpoint: CompressedCheckpoint) -> str:
    if any(layer.format in _BFLOAT16_FORMATS for layer in checkpoint.layers.values()):
        return "use a bfloat16 model"
    if _cause(checkpoint):
        return 'set "symmetric" to true for the weights'
    return READER_HELP


def _reader() -> str:
    return (
        f"transformers {transformers.__version__} with compressed-tensors "
        f"{compressed_tensors.__version__}"
    )
