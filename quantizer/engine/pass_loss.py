"""What passes that change the float function cost the outputs, apart from what quantization costs them."""

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
"""Of outputs that are not finite, which have no ratio."""


@dataclass(frozen=True)
class PassLoss:
    """SQNR of all outputs on one batch, in dB, infinite without a difference.

    Args:
        names: the passes that changed the function.
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

    >>> sentence({"names": ["a_pass"], "passes_db": 25.31, "quantization_db": 38.7, "together_db": 25.1})
    'passes: 25.3 dB, quantization: 38.7 dB, together 25.1 dB on one batch (a_pass)'
    """
    passes = _in_words(figures["passes_db"])
    quantization = _in_words(figures["quantization_db"])
    together = _in_words(figures["together_db"])
    names = ", ".join(figures["names"])
    return f"passes: {passes}, quantization: {quantization}, together {together} on one batch ({names})"


def pass_loss(calibrated: Calibrated, quantized: Network, batch: Batch) -> PassLoss | None:
    """Return what passes cost, or None if none changes the function of this model.

    Args:
        calibrated: says what passes made of the model.
        quantized: its quantized network.
        batch: the one that is compared, on the networks' device.
    """
    graph = calibrated.float_as_run
    if not graph.deviations:
        return None
    outputs = []
    with torch.no_grad():
        for network in (Network(calibrated.original), Network(graph), quantized):
            outputs.append(network.start(batch.args, batch.kwargs).advance().float_outputs())
    user, passed, found = outputs
    return PassLoss(graph.deviations, _sqnr_db(user, passed), _sqnr_db(passed, found), _sqnr_db(user, found))


def _sqnr_db(reference: list[Tensor], other: list[Tensor]) -> float:
    """Of all values together."""
    noise = Noise()
    for x, y in zip(reference, other, strict=True):
        noise.add(x, y)
    return noise.sqnr_db


def _finite(ratio: float) -> float | None:
    """The ratio, None where there is no difference; where nothing is left, the least that can be."""
    return None if ratio == math.inf else max(LEAST_DB, ratio)


def _in_words(ratio: float | None) -> str:
    return "no loss" if ratio is None else f"{ratio:.1f} dB"
