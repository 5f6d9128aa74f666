"""The compressed-tensors target: a Hugging Face folder that transformers, vLLM and SGLang load.
Weights from codes.
"""

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from quantizer.config.model import QuantizationSpec
from quantizer.errors import ResultError, UsageError
from quantizer.export import Refusal, check
from quantizer.export.agreement import Verification
from quantizer.export.compressed_tensors.checkpoint import NAME, Checkpoint, of_network
from quantizer.export.compressed_tensors.placement import place
from quantizer.export.compressed_tensors.verify import verify_folder
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.hugging_face_folder import (
    QUANTIZATION,
    described,
    source_of,
    write_folder,
)
from quantizer.export.transformers_verify import Expected
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key
from quantizer.sources.hugging_face import CONFIG
from quantizer.storage.atomic_write import replaced_folder
from quantizer.storage.files import cannot_write, read_json


def refusals(
    graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int
) -> Iterator[Refusal]:
    """What checkpoints have no place for; they have no operator set."""
    yield from place(graph, specs).refusals


def export(deployment: Deployment, path: Path) -> Verification:
    """Write a folder as `save_pretrained` does: config.json with `quantization_config`, weights
    as codes in shards, tokenizer and generation settings.

    The codes are those of the calibration. transformers loads the folder and runs it on all
    calls before it stands at `path`.

    Raises:
        UsageError: the format cannot say what the config asks for, the model has no config of
            transformers, or `path` is something else than an earlier export.
        VerificationError: transformers does not give test mode's outputs.
        ResultError: the folder cannot be written.
    """
    check(NAME, deployment.graph, deployment.solution.specs, deployment.opset)
    if deployment.model is None:
        raise UsageError(
            f"--deploy {NAME} needs the float model", help="give it to Deployment.of"
        )
    # Refuses others than transformers' models before there is any work
    described(deployment.model)
    network = deployment.network()

    calls = (
        Expected(args, kwargs, tensor_leaves(network(*args, **kwargs)))
        for args, kwargs in deployment.calls()
    )
    return write_verified(
        of_network(deployment), deployment.model, path, calls, deployment.sqnr_db
    )


def write_verified(
    checkpoint: Checkpoint,
    model: nn.Module,
    path: Path,
    calls: Iterable[Expected],
    sqnr_db: float = math.inf,
) -> Verification:
    """Write a checkpoint, with what `model` says of itself, and put it to `path` when it is
    verified.

    Raises:
        VerificationError, UsageError, ResultError: as `export`.
    """
    if path.exists() and not is_ours(path, model):
        remedy = "give a path where nothing is, or an earlier export"
        raise UsageError(f"{path} is no earlier export, and is not replaced", help=remedy)
    try:
        with replaced_folder(path) as folder:
            remarks = write_folder(
                folder, model, checkpoint.stored(), checkpoint.quantization_config()
            )
            found = verify_folder(folder, checkpoint, calls, sqnr_db, path.name)
    except OSError as error:
        raise cannot_write(path, error) from error
    return replace(found, remarks=(*found.remarks, *remarks))


def remove(deployment: Deployment, path: Path) -> None:
    """Remove an earlier export, and nothing else."""
    if deployment.model is not None and is_ours(path, deployment.model):
        shutil.rmtree(path.resolve())


def is_ours(path: Path, model: nn.Module) -> bool:
    """Whether a folder is empty or holds a checkpoint in this format that `model` was not read
    from.
    """
    source = source_of(model)
    if not path.is_dir() or (source is not None and path.samefile(source)):
        return False
    if not any(path.iterdir()):
        return True
    try:
        written = read_json(path / CONFIG).get(QUANTIZATION) or {}
    except (ResultError, AttributeError):
        return False
    return bool(written.get("quant_method") == NAME)
