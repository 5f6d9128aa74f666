"""Writes the gptq target, a Hugging Face folder for engines that read checkpoints of GPTQ."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.calibration.solution import Solution
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    CompressedCheckpoint,
    checkpoint_of_network,
)
from quantizer.export.compressed_tensors.placement import place_codes, value_layers
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.gptq_folder.layout import (
    TARGET_NAME,
    GptqScheme,
    gptq_refusals,
    layer_tensors,
    with_stored_scales,
)
from quantizer.export.hugging_face_folder import write_folder
from quantizer.export.model_tensors import model_of, with_scales_of_file
from quantizer.export.transformers_verify import ExpectedCall, expected_calls, verify_calls
from quantizer.graph.ir import Graph
from quantizer.graph.structure.language_parts import layers_behind_blocks
from quantizer.nn.network import Network
from quantizer.option_words import Sentence
from quantizer.plan.model import TensorSpecs
from quantizer.sources.files.json_files import GPTQ_FILE
from quantizer.sources.hugging_face import loader
from quantizer.storage.files import write_json

_FORM = "gptq"
"""The first version, in which zero points are stored minus one."""
_ROUNDED = Sentence(
    "its scales are rounded to the model's dtype; test mode with <--deploy gptq> computes with "
    "these"
)


@dataclass(frozen=True)
class GptqFolder:
    """A folder that was written, and the network that it stands for."""

    path: Path
    name: str
    network: Network
    remarks: list[str]


class GptqExporter(Exporter[GptqFolder]):
    """Writes a folder like `save_pretrained`, with the codes in the layout of GPTQ.

    It has config.json with `quantization_config`, and quantize_config.json for older readers.
    """

    writes_folder = True

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return the tensors and specs that the form cannot express."""
        return tuple(gptq_refusals(graph, specs))

    def value_layers(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return the embeddings and other layers that have no place for codes."""
        return value_layers(specs, place_codes(graph, specs))

    def plain_layers(self, graph: Graph) -> tuple[str, ...]:
        """Return the poolers and classifiers behind the blocks."""
        return layers_behind_blocks(graph)

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with the file's scales, which are in the model's dtype."""
        if self.refusals(graph, solution.specs, -1):
            return solution
        layers = place_codes(graph, solution.specs).linears
        return with_scales_of_file(graph, solution, layers, with_stored_scales)

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
        yield GptqFolder(path, path.name, stored.network(), notes)

    def verify(self, deployment: Deployment, written: GptqFolder) -> Verification:
        """Compare the outputs of the folder, read and dequantized, with those of test mode."""

        def load(call: ExpectedCall) -> nn.Module:
            """Return the network that transformers reads from the folder."""
            with _without_remarks():
                return loader.load_hugging_face(written.path)

        calls = expected_calls(deployment, written.network)
        verification = verify_calls(
            load, calls, deployment.sqnr_db, written.name, is_exact=True
        )
        return replace(verification, remarks=(*verification.remarks, *written.remarks))


def _settings(checkpoint: CompressedCheckpoint) -> dict[str, Any]:
    """Return the field `quantization_config`.

    The form has no list of layers in float. Engines read patterns of names in `dynamic`, of
    which those that begin with a minus stay float.
    """
    specs = [layer.weight.spec for layer in checkpoint.layers.values()]
    scheme = GptqScheme.of(specs[0])
    settings: dict[str, Any] = {
        "quant_method": _FORM,
        "checkpoint_format": _FORM,
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": False,
        "lm_head": checkpoint.head in checkpoint.layers,
        "pack_dtype": "int32",
    }
    floats: dict[str, dict[str, Any]] = {}
    for path in sorted(checkpoint.linears):
        if path not in checkpoint.layers and path != checkpoint.head:
            floats[f"-:^{re.escape(path)}$"] = {}
    if floats:
        settings["dynamic"] = floats
    return settings


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Suppress what reading says to users who give the folder as a model."""
    logger = logging.getLogger(loader.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
