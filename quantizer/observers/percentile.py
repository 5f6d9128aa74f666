"""The percentile method: magnitudes beyond the given percentile are cut off."""

from __future__ import annotations

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.registry import register
from quantizer.observers.batch import BINS, Batch, Range
from quantizer.observers.methods import METHODS


@register(METHODS, "percentile")
def percentile(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range cut at the magnitude below which `spec.percentage` percent of the values lie.

    The magnitude is the left edge of the histogram's bin where the cumulative share gets there (of the first bin the
    right edge, so that the range is never empty); 100 percent is the maximum itself. An asymmetric range is cut at the
    same magnitude on both sides: (100 - percentage) percent is cut off in all, shared by the two tails as the data has
    them, and one-sided data such as a ReLU's is treated as symmetric.
    """
    if spec.percentage >= 100:
        return batch.low, batch.high
    share = batch.magnitudes.cumsum(1) / batch.magnitudes.sum(1, keepdim=True)
    wanted = torch.full((len(share), 1), spec.percentage / 100, dtype=torch.float64)
    bins = torch.searchsorted(share, wanted).squeeze(1).clamp(1, BINS)
    return batch.clipped(batch.amax * bins / BINS)
