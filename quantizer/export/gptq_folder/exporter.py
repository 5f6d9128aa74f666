"""Writes the gptq target, a Hugging Face folder for engines that read checkpoints of GPTQ."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    CheckpointExporter,
    CompressedCheckpoint,
    checkpoint_of_network,
)
from quantizer.export.compressed_tensors.placement import place_codes
from quantizer.export.compressed_tensors.schemes import as_unsigned, pack_words
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.hugging_face_folder import write_folder
from quantizer.export.limits import Limit, beyond, is_symmetric
from quantizer.export.transformers_models import (
    ExpectedCall,
    cannot_store,
    expected_calls,
    model_of,
    scales_by_row,
    silenced,
    verify_calls,
    with_scales_of_file,
    without_codes,
)
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import Network
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.option_words import Sentence
from quantizer.plan.model import Key, TensorSpecs
from quantizer.sources.hugging_face import loader
from quantizer.sources.json_files import GPTQ_FILE
from quantizer.storage.files import write_json

TARGET_NAME = "gptq"
_FORM = "gptq"
"""The first version, in which zero points are stored minus one."""
_ROUNDED = Sentence(
    "its scales are rounded to the model's dtype; test mode with <--deploy gptq> computes with "
    "these"
)
WHOLE_ROWS = -1
_WORD_BITS = 32
_LIMITS = (
    Limit(
        lambda spec: spec.dtype == "int" and spec.bit_width in (2, 3, 4, 8),
        "is {number_format}, and the form has 2, 3, 4 or 8 bits",
        "set its dtype to int4",
    ),
)
_WEIGHT_ONLY = (
    "is quantized at run time, and checkpoints of GPTQ have only weights",
    "quantize only weights, or use <--deploy compressed-tensors>",
)
_EXPERTS = (
    "is of experts, which are not written in this form",
    "use <--deploy compressed-tensors>, or exclude experts",
)
_OTHER_SCHEME = (
    "has other bits, groups or symmetry than the first layer, and the form has one of each"
)
_ALIKE_HELP = "quantize all linear layers alike, or exclude some"


def _scheme(spec: QuantizationSpec) -> dict[str, Any]:
    """Return the settings that all layers of a checkpoint have in common, for a weight."""
    group_size = spec.group_size if spec.qscheme == "per_group" else None
    return {
        "bits": spec.bit_width,
        "group_size": WHOLE_ROWS if group_size is None else group_size,
        "sym": is_symmetric(spec),
    }


def gptq_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield what a checkpoint of GPTQ has no place for."""
    placement = place_codes(graph, specs)
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    refused: set[Key] = set()
    for (layer, role), spec in specs.items():
        reason: Reason | None = None
        if not is_parameter(role):
            reason = _WEIGHT_ONLY
        elif layer in placement.experts:
            reason = _EXPERTS
        elif role == "weights" and layer in placement.linears:
            reason = _weight_refusal(graph, placement.linears[layer], spec)
        if reason is not None:
            refused.add((layer, role))
            yield Refusal(*reason, layer, role)
    for refusal in placement.refusals:
        if (refusal.layer, refusal.role) not in refused:
            yield refusal
    if not refused:
        yield from _other_schemes(placement.linears, specs)


def _weight_refusal(graph: Graph, node: Node, spec: QuantizationSpec) -> Reason | None:
    """Return why a weight has no place in the layout."""
    reason = beyond(_LIMITS, spec)
    if reason is not None:
        return reason
    for name, length in zip(("outputs", "inputs"), graph.weight(node).shape, strict=True):
        if length * spec.bit_width % _WORD_BITS:
            return (
                f"has {length} {name}, which do not fill words of {_WORD_BITS} bits",
                "exclude the layer, or use <--deploy compressed-tensors>",
            )
    return None


def _other_schemes(linears: Mapping[str, Node], specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield a refusal for each layer that has another scheme than the first."""
    schemes = {layer: _scheme(specs[layer, "weights"]) for layer in linears}
    for layer, scheme in schemes.items():
        if scheme != next(iter(schemes.values())):
            yield Refusal(_OTHER_SCHEME, _ALIKE_HELP, layer, "weights")


def layer_tensors(path: str, weight: QuantizedTensor) -> dict[str, Tensor]:
    """Return what the file holds of a layer, by the names that follow its path.

    `qweight` is packed along the inputs, `qzeros` along the outputs. Zero points are stored
    minus one, as in the first version of the form.

    Args:
        path: of the layer.
        weight: with codes.

    Raises:
        UsageError: it has no codes, or a zero point of 0.
    """
    spec = weight.spec
    if weight.codes is None:
        raise without_codes(TARGET_NAME, path)
    codes = as_unsigned(weight.codes, spec)
    scale = scales_by_row(weight.scale, codes)
    zero_point = scales_by_row(weight.zero_point, codes)
    if is_symmetric(spec):
        zero_point = torch.full_like(zero_point, 1 << (spec.bit_width - 1))
    if not zero_point.all():
        raise cannot_store(
            TARGET_NAME,
            f"{path} has a zero point of 0, and the form stores them minus one",
            "set symmetric to true for the weights, or use <--deploy compressed-tensors>",
        )
    zeros = (zero_point - 1).to(torch.uint8).t()
    inputs = codes.shape[1]
    group_size = inputs // scale.shape[1]
    return {
        "qweight": pack_words(codes, spec.bit_width).t().contiguous(),
        "qzeros": pack_words(zeros, spec.bit_width),
        "scales": scale.t().to(weight.dtype).contiguous(),
        "g_idx": (torch.arange(inputs) // group_size).int(),
    }


@dataclass(frozen=True)
class GptqFolder:
    """A folder that was written, and the network that it stands for."""

    path: Path
    network: Network
    remarks: list[str]


class GptqExporter(CheckpointExporter[GptqFolder]):
    """Writes a folder with the codes in the layout of GPTQ.

    It has config.json with `quantization_config`, and quantize_config.json for older readers.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return the tensors and specs that the form cannot express."""
        return tuple(gptq_refusals(graph, specs))

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with the file's scales, which are in the model's dtype."""
        if self.refusals(graph, solution.specs, -1):
            return solution
        layers = place_codes(graph, solution.specs).linears

        return with_scales_of_file(
            graph,
            solution,
            layers,
            lambda weight: replace(weight, scale=weight.scale.to(weight.dtype).float()),
        )

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[GptqFolder]:
        """Fill the folder at `path`.

        Raises:
            UsageError: the form cannot express the config, the model has no config of
                transformers, or something else than an earlier export is at `path`.
            ResultError: the folder cannot be written.
        """
        model = model_of(deployment, TARGET_NAME)
        solution = self.as_run(deployment.graph, deployment.solution)
        stored = replace(deployment, solution=solution)
        checkpoint = checkpoint_of_network(stored, TARGET_NAME)
        tensors = {**checkpoint.unused, **checkpoint.tensors}
        for layer_path, layer in checkpoint.layers.items():
            del tensors[f"{layer_path}.weight"]
            for part, tensor in layer_tensors(layer_path, layer.weight).items():
                tensors[f"{layer_path}.{part}"] = tensor
        settings = _settings(checkpoint)
        remarks = write_folder(path, model, tensors, settings)
        write_json(path / GPTQ_FILE, settings)
        notes = [*checkpoint.remarks, *remarks]
        if next(model.parameters()).dtype != torch.float32:
            notes.append(_ROUNDED)
        yield GptqFolder(path, stored.network(), notes)

    def verify(self, deployment: Deployment, written: GptqFolder) -> Verification:
        """Compare the outputs of the folder, read and dequantized, with those of test mode."""

        def load(call: ExpectedCall) -> nn.Module:
            """Return the network that transformers reads from the folder."""
            # It says something to users who give the folder as a model
            with silenced(loader.__name__):
                return loader.load_hugging_face(written.path)

        calls = expected_calls(deployment, written.network)
        verification = verify_calls(
            load, calls, deployment.sqnr_db, written.path.name, is_exact=True
        )
        return replace(verification, remarks=(*verification.remarks, *written.remarks))


def _settings(checkpoint: CompressedCheckpoint) -> dict[str, Any]:
    """Return the field `quantization_config`.

    The form has no list of layers in float. Engines read patterns of names in `dynamic`, of
    which those that begin with a minus stay float.
    """
    first = next(iter(checkpoint.layers.values()))
    settings: dict[str, Any] = {
        "quant_method": _FORM,
        "checkpoint_format": _FORM,
        **_scheme(first.weight.spec),
        "desc_act": False,
        "lm_head": checkpoint.head in checkpoint.layers,
        "pack_dtype": "int32",
    }
    paths = {*checkpoint.linears} - {*checkpoint.layers, checkpoint.head}
    floats: dict[str, Any] = {f"-:^{re.escape(path)}$": {} for path in sorted(paths)}
    if floats:
        settings["dynamic"] = floats
    return settings
