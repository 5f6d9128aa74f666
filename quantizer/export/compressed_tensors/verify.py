"""Loads a checkpoint as its users do, with transformers on the CPU, and refuses one that is not
test mode's.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import compressed_tensors
import transformers
from torch import nn

from quantizer.errors import VerificationError
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import Checkpoint
from quantizer.export.compressed_tensors.schemes import MXFP4, NVFP4, PACKED, is_symmetric
from quantizer.export.transformers_verify import HELP, Expected, require_all_keys, verify_calls
from quantizer.sources.hugging_face import CONFIG, read_checkpoint

_BFLOAT16 = (MXFP4, NVFP4)
"""Formats that readers compute in that dtype."""


def verify_folder(
    folder: Path, checkpoint: Checkpoint, calls: Iterable[Expected], sqnr_db: float, name: str
) -> Verification:
    """Compare the outputs of a folder, loaded by transformers, with test mode's; see
    `verify_calls`.

    Args:
        checkpoint: what the folder holds.

    Raises:
        VerificationError: transformers cannot load or run it, or gives other outputs.
    """
    remarks: tuple[str, ...] = ()

    def load(call: Expected) -> nn.Module:
        nonlocal remarks
        module, remarks = _loaded(folder, checkpoint, call, name)
        return module

    # Mxfp4's values need no rounding
    rounded = any(layer.format == NVFP4 for layer in checkpoint.layers.values())
    found = verify_calls(
        load, calls, sqnr_db, name, is_exact=checkpoint.is_weight_only and not rounded
    )
    return replace(found, remarks=(*checkpoint.remarks, *remarks))


def _loaded(
    folder: Path, checkpoint: Checkpoint, call: Expected, name: str
) -> tuple[nn.Module, tuple[str, ...]]:
    """The module of a plain `from_pretrained`, or where this reader cannot, of one that is told
    to dequantize.

    The latter leaves inputs in float and reads all layers as it reads the first, so it is no
    way out for others.
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
            text = (
                f"{name} is not written: {_reader()} cannot run it: {type(error).__name__}: "
                f"{why}"
            )
            raise VerificationError(text, help=_remedy(checkpoint)) from error
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    remark = (
        f"{cause}: load it with quantization_config=CompressedTensorsConfig(dequantize=True), "
        f"or {_remedy(checkpoint)}"
    )
    return _run(folder, call, name, quantization_config=settings), (remark,)


def _run(folder: Path, call: Expected, name: str, **settings: Any) -> nn.Module:
    """The folder's model, after a first call, which unpacks the weights.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    architectures = json.loads((folder / CONFIG).read_text("utf-8")).get("architectures") or [
        "AutoModel"
    ]
    module, report = read_checkpoint(folder, architectures[0], **settings)
    require_all_keys(report, _reader(), name)
    module(*call.args, **call.kwargs)
    return module


def _cause(checkpoint: Checkpoint) -> str | None:
    """Why this reader may not load a checkpoint by default that others load."""
    layers = checkpoint.layers.values()
    if any(layer.format == PACKED and not is_symmetric(layer.weight.spec) for layer in layers):
        return f"{_reader()} does not load packed asymmetric weights by default"
    fp4 = sorted(
        {layer.format.partition("-")[0] for layer in layers if layer.format in _BFLOAT16}
    )
    if fp4:
        return (
            f"{_reader()} computes {' and '.join(fp4)} in bfloat16, and the model is in "
            "another dtype"
        )
    return None


def _remedy(checkpoint: Checkpoint) -> str:
    if any(layer.format in _BFLOAT16 for layer in checkpoint.layers.values()):
        return "use a bfloat16 model"
    return 'set "symmetric" to true for the weights' if _cause(checkpoint) else HELP


def _reader() -> str:
    return (
        f"transformers {transformers.__version__} with compressed-tensors "
        f"{compressed_tensors.__version__}"
    )
