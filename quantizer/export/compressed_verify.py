"""Loads a checkpoint as its users do, with transformers on the CPU, and refuses one that is not test mode's."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
import transformers
from torch import Tensor, nn

from quantizer.errors import VerificationError
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.compressed_checkpoint import Checkpoint
from quantizer.export.compressed_schemes import MXFP4, PACKED, is_symmetric
from quantizer.export.deployment import tensor_leaves
from quantizer.graph.trace import quiet
from quantizer.sources.hugging_face import CONFIG, read_checkpoint

EXACT_DB = 100.0
"""Of float32 networks with quantized weights alone: the sums are the same but for their order."""
MARGIN_DB, ENOUGH_DB = 3.0, 40.0
"""Of others: readers round scales to the model's dtype and find ranges in it, which moves some codes by a step."""
_HELP = "--deploy pt2 and safetensors need no such reader"


@dataclass(frozen=True)
class Expected:
    """A call of the model, and the tensors of test mode's output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]


def verify_folder(
    folder: Path, checkpoint: Checkpoint, calls: Iterable[Expected], sqnr_db: float, name: str
) -> Verification:
    """Compare the outputs of a folder, loaded by transformers, with test mode's over all calls.

    Args:
        checkpoint: what the folder holds.
        calls: at least one, gone through once.
        sqnr_db: what quantization costs the outputs, in dB: a reader that rounds otherwise should not cost more.
        name: stands for the folder in messages.

    Raises:
        VerificationError: transformers cannot load or run it, or gives other outputs.
    """
    agreement, rest = Agreement("outputs"), iter(calls)
    with torch.no_grad():
        first = next(rest)
        with _quiet():
            module, remarks = _loaded(folder, checkpoint, first, name)
        for call in chain([first], rest):
            agreement.add(call.outputs, tensor_leaves(module(*call.args, **call.kwargs)))
    found = agreement.result()
    is_exact = checkpoint.is_weight_only and all(output.dtype == torch.float32 for output in first.outputs)
    least = EXACT_DB if is_exact else min(ENOUGH_DB, sqnr_db - MARGIN_DB)
    if found.sqnr_db is not None and found.sqnr_db < least:
        raise VerificationError(
            f"{name} is not written: transformers does not compute what test mode does: {found.figures()}", help=_HELP
        )
    return replace(found, remarks=(*checkpoint.remarks, *remarks))


def _loaded(folder: Path, checkpoint: Checkpoint, call: Expected, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """The module of a plain `from_pretrained`, or where this reader cannot, of one that is told to dequantize.

    The latter leaves inputs in float and reads all layers as it reads the first, so it is no way out for others.
    """
    try:
        return _run(folder, call, name), ()
    except VerificationError:
        raise
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        can_dequantize = len(checkpoint.schemes) == 1 and checkpoint.is_weight_only
        cause = _cause(checkpoint) if can_dequantize else None
        if cause is None:
            text = f"{name} is not written: {_reader()} cannot run it: {type(error).__name__}: {why}"
            raise VerificationError(text, help=_remedy(checkpoint)) from error
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    remark = (
        f"{cause}: load it with quantization_config=CompressedTensorsConfig(dequantize=True), or {_remedy(checkpoint)}"
    )
    return _run(folder, call, name, quantization_config=settings), (remark,)


def _run(folder: Path, call: Expected, name: str, **settings: Any) -> nn.Module:
    """The folder's model, after a first call, which unpacks the weights.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    architectures = json.loads((folder / CONFIG).read_text("utf-8")).get("architectures") or ["AutoModel"]
    module, report = read_checkpoint(folder, architectures[0], **settings)
    strange = [f"{key} {kind.partition('_')[0]}" for kind in _KINDS for key in sorted(map(str, report.get(kind, ())))]
    if strange:
        raise VerificationError(f"{name} is not written: {_reader()} finds {', '.join(strange[:3])}", help=_HELP)
    module(*call.args, **call.kwargs)
    return module


_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def _cause(checkpoint: Checkpoint) -> str | None:
    """Why this reader may not load a checkpoint by default that others load."""
    layers = checkpoint.layers.values()
    if any(layer.format == PACKED and not is_symmetric(layer.weight.spec) for layer in layers):
        return f"{_reader()} does not load packed asymmetric weights by default"
    if any(layer.format == MXFP4 for layer in layers):
        return f"{_reader()} computes mxfp4 in bfloat16, and the model is in another dtype"
    return None


def _remedy(checkpoint: Checkpoint) -> str:
    if any(layer.format == MXFP4 for layer in checkpoint.layers.values()):
        return "use a bfloat16 model"
    return 'set "symmetric" to true for the weights' if _cause(checkpoint) else _HELP


def _reader() -> str:
    return f"transformers {transformers.__version__} with compressed-tensors {compressed_tensors.__version__}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, warnings and what transformers logs on the way: what matters of it is in its report."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with quiet():
            yield
    finally:
        logger.setLevel(level)
