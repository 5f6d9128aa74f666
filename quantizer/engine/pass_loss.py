"""Measures what passes that change the float function cost, apart from what quantization costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.engine.calibrated import Calibrated
from quantizer.engine.noise import Noise
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

LEAST_DB = -999.0
"""The SQNR of outputs that are not finite or have other shapes."""
SAME_DB = 100.0
"""The SQNR from which on a difference is that of float arithmetic, and the function is the same."""


@dataclass(frozen=True)
class PassLoss:
    """The SQNR of all outputs on one batch, in dB; infinite where there is no difference.

    Args:
        names: the passes that have changed the function.
        passes_db: of the float network after all passes against the user's model.
        quantization_db: of the quantized network against that float network.
        together_db: of the quantized network against the user's model.
    """

    names: tuple[str, ...]
    passes_db: float
    quantization_db: float
    together_db: float

    @property
    def line(self) -> str:
        """Return all three figures as a sentence."""
        return sentence(self.to_json())

    def to_json(self) -> Mapping[str, Any]:
        """Return what report.json and run.json say, infinite figures as null."""
        return {
            "names": list(self.names),
            "passes_db": _finite(self.passes_db),
            "quantization_db": _finite(self.quantization_db),
            "together_db": _finite(self.together_db),
        }


def sentence(figures: Mapping[str, Any]) -> str:
    """Return a sentence on figures as report.json has them.

    >>> figures = {"passes_db": 25.31, "quantization_db": 38.7, "together_db": 25.1}
    >>> sentence(figures | {"names": ["a_pass"]})
    'passes: 25.3 dB, quantization: 38.7 dB, together 25.1 dB on one batch (a_pass)'
    """
    passes = _in_words(figures["passes_db"])
    quantization = _in_words(figures["quantization_db"])
    together = _in_words(figures["together_db"])
    names = ", ".join(figures["names"])
    ratios = f"passes: {passes}, quantization: {quantization}, together {together}"
    return f"{ratios} on one batch ({names})"


def pass_loss(calibrated: Calibrated, quantized: Network, batch: Batch) -> PassLoss | None:
    """Return what passes cost, or None if none changes the function of this model on the batch.

    Args:
        calibrated: the model, and what passes have made of it.
        quantized: its quantized network.
        batch: one batch of data, on the networks' device.
    """
    graph = calibrated.float_as_run
    if not graph.deviations:
        return None
    outputs = []
    with torch.no_grad():
        for network in (Network(calibrated.original), Network(graph), quantized):
            outputs.append(network.start(batch.args, batch.kwargs).advance().float_outputs())
    user, passed, rounded = outputs
    passes_db = _sqnr_db(user, passed)
    if passes_db >= SAME_DB:
        return None
    return PassLoss(
        graph.deviations,
        passes_db=passes_db,
        quantization_db=_sqnr_db(passed, rounded),
        together_db=_sqnr_db(user, rounded),
    )


def _sqnr_db(reference: list[Tensor], other: list[Tensor]) -> float:
    """The SQNR of all values together."""
    noise = Noise()
    for x, y in zip(reference, other, strict=True):
        if x.shape != y.shape:
            return LEAST_DB
        noise.add(x, y)
    return noise.sqnr_db


def _finite(ratio: float) -> float | None:
    """The ratio as JSON can hold it, None where there is no difference."""
    return None if ratio == math.inf else max(LEAST_DB, ratio)


def _in_words(ratio: float | None) -> str:
    return "no loss" if ratio is None else f"{ratio:.1f} dB"
