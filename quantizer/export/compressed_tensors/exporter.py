"""Writes the compressed-tensors target, a Hugging Face folder for transformers and vLLM."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import (
    TARGET_NAME,
    CompressedCheckpoint,
    build_remarks,
    checkpoint_of_network,
)
from quantizer.export.compressed_tensors.placement import place_codes, value_layers
from quantizer.export.compressed_tensors.verify import verify_folder
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.hugging_face_folder import write_folder
from quantizer.export.model_tensors import model_of
from quantizer.export.transformers_verify import ExpectedCall, expected_calls
from quantizer.graph.ir import Graph
from quantizer.graph.structure.language_parts import layers_behind_blocks
from quantizer.plan.model import TensorSpecs


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that was written, with its checkpoint. Messages call it `name`."""

    path: Path
    name: str
    checkpoint: CompressedCheckpoint
    remarks: list[str]


class CompressedTensorsExporter(Exporter[CheckpointFolder]):
    """Writes a folder like `save_pretrained`, with the calibration's codes as weights.

    The folder has config.json with `quantization_config`, shards, tokenizer and generation
    settings.
    """

    writes_folder = True

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> tuple[Refusal, ...]:
        """Return the tensors and specs that checkpoints cannot express."""
        return place_codes(graph, specs).refusals

    def value_layers(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return the embeddings and other layers that have no place for codes."""
        return value_layers(specs, place_codes(graph, specs))

    def plain_layers(self, graph: Graph) -> tuple[str, ...]:
        """Return the poolers and classifiers behind the blocks."""
        return layers_behind_blocks(graph)

    def notes(self, graph: Graph, specs: TensorSpecs) -> tuple[str, ...]:
        """Return for which builds of vLLM a checkpoint is."""
        return build_remarks(specs, place_codes(graph, specs))

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
    return CheckpointFolder(folder, folder.name, checkpoint, remarks)


def verified_folder(
    written: CheckpointFolder, calls: Iterable[ExpectedCall], sqnr_db: float = math.inf
) -> Verification:
    """Compare the outputs of transformers, which runs a folder, with those of test mode.

    Args:
        written: the folder.
        calls: inputs with the outputs of test mode.
        sqnr_db: the SQNR of the quantized network, as in `Deployment`.

    Raises:
        VerificationError: the outputs differ.
    """
    verification = verify_folder(
        written.path, written.checkpoint, calls, sqnr_db=sqnr_db, name=written.name
    )
    return replace(verification, remarks=(*verification.remarks, *written.remarks))
