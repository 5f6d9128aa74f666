"""The maxmin method: the range is what was seen."""

from __future__ import annotations

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.registry import register
from quantizer.observers.batch import Batch, Range
from quantizer.observers.methods import METHODS


@register(METHODS, "maxmin")
def maxmin(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the exact extremes of every row."""
    return batch.low, batch.high
