"""Writes the compressed-tensors target, a Hugging Face folder for transformers and vLLM, of a
traced network or of a model that was quantized in place.
"""

import json
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compressed_tensors
import transformers
from torch import nn

from quantizer.calibration.changed_modules import role_in_module
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import parameter_role
from quantizer.errors import UsageError, VerificationError, first_line
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    TARGET_NAME,
    CheckpointExporter,
    CompressedCheckpoint,
    build_remarks,
    checkpoint_of_network,
    complete_checkpoint,
    float_remarks,
    with_experts,
)
from quantizer.export.compressed_tensors.placement import CodePlacement, place_codes
from quantizer.export.compressed_tensors.schemes import (
    MXFP4_FORMAT,
    MXFP8_FORMAT,
    NVFP4_FORMAT,
    PACKED_FORMAT,
    CompressedLayer,
)
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporter import Refusal, new_files
from quantizer.export.hugging_face_folder import model_config, write_folder
from quantizer.export.limits import is_symmetric
from quantizer.export.refusals import refuse
from quantizer.export.transformers_models import (
    INSERTION_REASON,
    READER_HELP,
    ExpectedCall,
    expected_calls,
    model_of,
    quantized_layers,
    require_all_keys,
    state_of,
    verify_calls,
)
from quantizer.graph.ir import Graph, Node
from quantizer.graph.modules import as_planned, key_in_module, module_graph, parameters_of
from quantizer.nn.inplace import InPlace
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.plan.model import Key, TensorSpecs
from quantizer.sources.batches import Batch
from quantizer.sources.hugging_face.loader import read_checkpoint
from quantizer.sources.json_files import CONFIG_FILE
from quantizer.sources.module_state import evaluating, without_cache

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


# What quantization is assumed to cost where there is no float model to compare with.
_UNKNOWN_LOSS_DB = 23.0


def export_modules(model: nn.Module, folder: Path, batches: Iterable[Batch]) -> Verification:
    """Write the checkpoint and verify it with calls of the model.

    Args:
        batches: of calls; at least one.

    Raises:
        ModelError: the model has no quantized layer.
        UsageError: the format cannot say how a layer is quantized, or the model has no config
            of transformers.
        VerificationError: transformers does not give the model's outputs.
        ResultError: the folder cannot be written.
    """
    checkpoint = _checkpoint_of_modules(model)
    model_config(model)

    def calls() -> Iterator[ExpectedCall]:
        """Yield each batch on the CPU, with the outputs of the model for it."""
        device = next(model.parameters()).device
        for batch in batches:
            on_device = batch.to(device)
            on_cpu = batch.to("cpu")
            leaves = tensor_leaves(model(*on_device.args, **on_device.kwargs))
            outputs = [leaf.cpu() for leaf in leaves]
            yield ExpectedCall(on_cpu.args, on_cpu.kwargs, outputs)

    exporter = CompressedTensorsExporter()
    with evaluating(model), without_cache(model), new_files(exporter, folder, model) as new:
        written = written_folder(checkpoint, model, new)
        return verified_folder(written, calls(), _UNKNOWN_LOSS_DB)


def _checkpoint_of_modules(model: nn.Module) -> CompressedCheckpoint:
    """Return the checkpoint of a model with quantized layers.

    Raises:
        ModelError: it has none.
        UsageError: the format cannot say how one is quantized.
    """
    quantized = quantized_layers(model)
    graph = module_graph(model)
    specs = _specs(graph, quantized)
    placement = place_codes(graph, specs)
    refuse(f"<--deploy {TARGET_NAME}>", [*_insertion_refusals(quantized), *placement.refusals])
    layers = {
        node.scope: _layer(quantized[node.scope], name, placement)
        for name, node in placement.linears.items()
    }
    prefixes = tuple(f"{path}.quantizers." for path in quantized)
    state = state_of(model).items()
    tensors = {name: tensor for name, tensor in state if not name.startswith(prefixes)}
    stacks = {
        node.params["weight"].partition("@")[0]: _stack(quantized[node.scope], node)
        for node in placement.experts.values()
    }
    remarks = [*float_remarks(specs, placement), *build_remarks(specs, placement)]
    return with_experts(
        complete_checkpoint(layers, tensors, remarks, model, graph), model, stacks
    )


def _specs(graph: Graph, quantized: Mapping[str, InPlace]) -> dict[Key, QuantizationSpec]:
    """Return the specs of the modules' quantizers, by the keys of their nodes in the graph."""
    keys: dict[Key, Key] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        for parameter in node.params:
            role = parameter_role(parameter)
            keys[node.scope, role_in_module(node, role)] = (node.name, role)
            names[node.scope] = node.name
    specs: dict[Key, QuantizationSpec] = {}
    for path, module in quantized.items():
        for role, quantizer in module.quantizers.items():
            if isinstance(quantizer, TensorQuantizer):
                key = keys.get((path, role), (names[path], role))
                specs[key] = quantizer.spec
    return specs


def _insertion_refusals(quantized: Mapping[str, InPlace]) -> Iterator[Refusal]:
    """Yield a refusal for what algorithms have put into modules."""
    for path, module in quantized.items():
        if "input_layers" in module._modules:
            yield Refusal(*INSERTION_REASON, path)
        if "has_added_bias" in vars(module):
            yield Refusal(
                "has a bias now that the model has no place for", INSERTION_REASON[1], path
            )


def _stack(module: InPlace, node: Node) -> QuantizedTensor:
    """Return a tensor of experts with codes."""
    key = key_in_module(node, "weight")
    quantizer = module.quantizers[parameter_role(key)]
    assert isinstance(quantizer, TensorQuantizer)
    parameter = module.get_parameter(parameters_of(module)[key])
    return quantizer.tensor.encoded(as_planned(module, key, parameter))


def _layer(module: InPlace, name: str, placement: CodePlacement) -> CompressedLayer:
    """Return a layer with codes and scales.

    Raises:
        UsageError: no codes give the weight back.
    """
    tensors = {
        role: quantizer.tensor
        for role, quantizer in module.quantizers.items()
        if isinstance(quantizer, TensorQuantizer)
    }
    weight = tensors["weights"].encoded(module.get_parameter("weight"))
    if weight.codes is None:
        raise UsageError(
            f"no codes give the weight of {name} back exactly: it was changed after it was "
            "quantized",
            help="export the model as quantize_model returned it",
        )
    return CompressedLayer(weight, tensors.get("input") if name in placement.inputs else None)
