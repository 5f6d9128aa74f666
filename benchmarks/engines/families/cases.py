"""Writes a small model in a scheme, with what test mode computes for some prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

import quantizer
from engines.families.models import FAMILIES
from engines.families.schemes import SCHEMES, Scheme
from engines.preparation import network_as_run
from quantizer.api.result import Result
from quantizer.errors import QuantizerError
from quantizer.export.exporter import exporter_of
from quantizer.export.refusals import require_expressible
from quantizer.export.targets import EXPORTERS, checked_target

DEQUANTIZED = "dequantized"
"""The name of an empty file beside a checkpoint that transformers loads with
`dequantize=True` only.
"""


@dataclass(frozen=True)
class Case:
    """A family in a scheme.

    Attributes:
        share: the bytes of the file's tensors, as a share of those of the float model.
        refusal: why the target cannot hold it, which is known before calibration.
        failure: the message of an export that failed after calibration.
        dequantized: whether transformers loads it with `dequantize=True` only.
        is_read: whether transformers loads it at all. If not, its tensors were compared.
        sqnr_db: the check of the file by transformers against test mode, in dB; None if all
            outputs are equal. A folder in GPTQ's form is dequantized by the quantizer first.
    """

    family: str
    scheme: str
    share: float = 0.0
    refusal: str = ""
    failure: str = ""
    dequantized: bool = False
    is_read: bool = True
    sqnr_db: float | None = None

    @property
    def is_written(self) -> bool:
        """Return whether there is a file."""
        return not self.refusal and not self.failure


def written_case(family: str, scheme: str, folder: Path) -> Case:
    """Write the file of a case as `model…`, and `expected.npz` with prompts and logits."""
    subject, how = FAMILIES[family], SCHEMES[scheme]
    model = subject.model(getattr(torch, how.dtype))
    batches = subject.batches()
    folder.mkdir(parents=True)
    path = folder / f"model{EXPORTERS[how.target].suffix}"
    if how.is_float:
        model.save_pretrained(path)
        write_expected(folder, model, batches[0])
        return Case(family, scheme)
    try:
        result = calibrated_for(model, how, batches)
    except QuantizerError as error:
        reason = error.message.rpartition(": ")[2]
        return Case(family, scheme, refusal=reason)
    try:
        verification = result.export(how.target, path)
    except QuantizerError as error:
        return Case(family, scheme, failure=error.message)
    write_expected(folder, network_as_run(result, how.target, {}), batches[0])
    dequantized = any("dequantize=True" in remark for remark in verification.remarks)
    if dequantized:
        (folder / DEQUANTIZED).touch()
    share, figure = share_of_bytes(model, path), verification.sqnr_db
    if figure is not None and math.isinf(figure):
        figure = None
    return Case(
        family,
        scheme,
        share,
        dequantized=dequantized,
        is_read=verification.compared != "tensors",
        sqnr_db=figure,
    )


def calibrated_for(model: nn.Module, how: Scheme, batches: list[Any]) -> Result:
    """Return the calibration of a model.

    Raises:
        QuantizerError: the target of the scheme cannot hold it.
    """
    exporter_of(how.target).require_model(model)
    result = quantizer.calibrate(model, how.config, batches)
    calibrated = result._calibrated
    checked = checked_target(how.target, {})
    require_expressible(checked, calibrated.graph, calibrated.solution.specs, -1)
    return result


@torch.no_grad()
def write_expected(folder: Path, network: nn.Module, batch: dict[str, Tensor]) -> None:
    """Write the tensors of a call and the logits of a network."""
    output = network(**batch)
    logits = output if isinstance(output, Tensor) else output.logits
    arrays: dict[str, Any] = {"logits": logits.float().numpy()}
    for name, value in batch.items():
        arrays[f"call_{name}"] = value.numpy()
    np.savez(folder / "expected.npz", **arrays)


def share_of_bytes(model: nn.Module, path: Path) -> float:
    """Return the bytes of a file's tensors as a share of those of the float model."""
    float_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if path.is_file():
        blocks = gguf.GGUFReader(path).tensors
        return sum(int(block.n_bytes) for block in blocks) / float_bytes
    stored_bytes = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                stored_bytes += stored.get_tensor(name).nbytes
    return stored_bytes / float_bytes
