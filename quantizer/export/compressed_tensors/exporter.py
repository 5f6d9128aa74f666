"""Writes the compressed-tensors target, a Hugging Face folder for transformers and vLLM."""

import json
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compressed_tensors
import transformers
from torch import nn

from quantizer.errors import VerificationError, first_line
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    TARGET_NAME,
    CheckpointExporter,
    CompressedCheckpoint,
    build_remarks,
    checkpoint_of_network,
)
from quantizer.export.compressed_tensors.placement import place_codes
from quantizer.export.compressed_tensors.schemes import (
    MXFP4_FORMAT,
    MXFP8_FORMAT,
    NVFP4_FORMAT,
    PACKED_FORMAT,
)
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Refusal
from quantizer.export.hugging_face_folder import write_folder
from quantizer.export.limits import is_symmetric
from quantizer.export.model_tensors import model_of
from quantizer.export.transformers_verify import (
    READER_HELP,
    ExpectedCall,
    expected_calls,
    require_all_keys,
    verify_calls,
)
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs
from quantizer.sources.hugging_face.loader import read_checkpoint
from quantizer.sources.json_files import CONFIG_FILE

_WEIGHT_ACCESS = re.compile(r"\b(self|module)\.(?:([\w.]+)\.)?weight\b")
_NOT_PACKED_HELP = (
    "leave such layers in float, or quantize weights and inputs to 8 bits, which are not "
    "packed; <--deploy pt2 and safetensors> need no such reader"
)
_HEAD_LIMITS = (
    "SGLang, and vLLM before its pull request 37291, build heads in float and cannot load it; "
    'exclude "kind:lm_head" for them'
)
# Readers compute these in bfloat16.
_BFLOAT16_FORMATS = (MXFP4_FORMAT, MXFP8_FORMAT, NVFP4_FORMAT)


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that was written, with its checkpoint."""

    path: Path
    checkpoint: CompressedCheckpoint
    remarks: list[str]


class CompressedTensorsExporter(CheckpointExporter[CheckpointFolder]):
    """Writes a folder for transformers and vLLM.

    The folder has config.json with `quantization_config`, shards, tokenizer and generation
    settings.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return the tensors and specs that checkpoints cannot express."""
        return place_codes(graph, specs).refusals

    def notes(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return for which builds of vLLM a checkpoint is."""
        return tuple(build_remarks(specs, place_codes(graph, specs)))

    @property
    def activation_codes(self) -> str:
        """Return int8: codes of checkpoints are signed."""
        return "int8"

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[CheckpointFolder]:
        """Fill the folder at `path`.

        Raises:
            UsageError: the format cannot express the config, the model has no config of
                transformers, or something else than an earlier export is at `path`.
            ResultError: the folder cannot be written.
        """
        model = model_of(deployment, TARGET_NAME)
        checkpoint = checkpoint_of_network(deployment)
        yield written_folder(checkpoint, model, path)

    def verify(self, deployment: Deployment, written: CheckpointFolder) -> Verification:
        """Compare the outputs of transformers with those of test mode."""
        calls = expected_calls(deployment, deployment.network())
        return verified_folder(written, calls, deployment.sqnr_db)


def written_folder(
    checkpoint: CompressedCheckpoint, model: nn.Module, folder: Path
) -> CheckpointFolder:
    """Write a checkpoint with the config of `model` to an empty folder.

    Raises:
        ResultError: the folder cannot be written.
    """
    quantization = checkpoint.quantization_config()
    remarks = write_folder(folder, model, checkpoint.stored(), quantization)
    return CheckpointFolder(folder, checkpoint, remarks)


def verified_folder(
    written: CheckpointFolder, calls: Iterable[ExpectedCall], sqnr_db: float
) -> Verification:
    """Compare the outputs of transformers, which runs a folder, with those of test mode.

    Args:
        written: the folder.
        calls: inputs with the outputs of test mode.
        sqnr_db: the SQNR of the quantized network, as in `Deployment`.

    Raises:
        VerificationError: transformers cannot load or run it, or its outputs differ.
    """
    checkpoint = written.checkpoint
    remarks = list(checkpoint.remarks)
    if checkpoint.head in checkpoint.layers:
        remarks.append(f"{checkpoint.head} is quantized: {_HEAD_LIMITS}")

    def load(call: ExpectedCall) -> nn.Module:
        """Return the network that transformers reads from the folder."""
        module, notes = _loaded(written, call)
        remarks.extend(notes)
        return module

    # The values of mxfp4 and mxfp8 need no rounding.
    is_rounded = any(layer.format == NVFP4_FORMAT for layer in checkpoint.layers.values())
    is_exact = checkpoint.is_weight_only and not is_rounded
    name = written.path.name
    verification = verify_calls(load, calls, sqnr_db, name, is_exact=is_exact)
    return replace(verification, remarks=(*remarks, *written.remarks))


def _loaded(written: CheckpointFolder, call: ExpectedCall) -> tuple[nn.Module, tuple[str, ...]]:
    """Load with a plain `from_pretrained` or, if this reader cannot, with dequantized weights.

    The latter leaves inputs in float and reads all layers as it reads the first, so it only
    works for checkpoints that are weight-only and have one scheme.
    """
    checkpoint = written.checkpoint
    try:
        return _run(written, call), ()
    except VerificationError:
        raise
    except Exception as error:
        layer = _layer_without_weight(error)
        problem = f"cannot run it: {type(error).__name__}: {first_line(error)}"
        cause, remedy = _cause(checkpoint)
        if layer is not None:
            reads = f"the model's code reads the weight of {layer}, which is packed"
            problem = f"cannot load it: {reads}"
            remedy = _NOT_PACKED_HELP
            cause = f"{_reader()} does not load it by default, as {reads}"
        refusal = VerificationError(
            f"{written.path.name} is not written: {_reader()} {problem}", help=remedy
        )
        if len(checkpoint.schemes) > 1 or not checkpoint.is_weight_only or cause is None:
            raise refusal from error
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    remark = (
        f"{cause}: load it with quantization_config=CompressedTensorsConfig(dequantize=True), "
        f"or {remedy}"
    )
    try:
        module = _run(written, call, quantization_config=settings)
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


def _run(written: CheckpointFolder, call: ExpectedCall, **settings: Any) -> nn.Module:
    """Return the folder's model after a first call, which unpacks the weights.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    config = json.loads((written.path / CONFIG_FILE).read_text("utf-8"))
    architectures = config.get("architectures") or ["AutoModel"]
    module, report = read_checkpoint(written.path, architectures[0], **settings)
    require_all_keys(report, _reader(), written.path.name, written.checkpoint.unused)
    module(*call.args, **call.kwargs)
    return module


def _cause(checkpoint: CompressedCheckpoint) -> tuple[str | None, str]:
    """Return why this reader may not load by default a checkpoint that others load, and what to
    change.
    """
    layers = checkpoint.layers.values()
    formats = {layer.format for layer in layers}.intersection(_BFLOAT16_FORMATS)
    remedy = "use a bfloat16 model"
    for layer in layers:
        if layer.format == PACKED_FORMAT and not is_symmetric(layer.weight.spec):
            why = f"{_reader()} does not load packed asymmetric weights by default"
            return why, remedy if formats else 'set "symmetric" to true for the weights'
    if not formats:
        return None, READER_HELP
    names = " and ".join(sorted(name.partition("-")[0] for name in formats))
    return (
        f"{_reader()} computes {names} in bfloat16, and the model is in another dtype",
        remedy,
    )


def _reader() -> str:
    return (
        f"transformers {transformers.__version__} with compressed-tensors "
        f"{compressed_tensors.__version__}"
    )
