"""A range method."""

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.histogram import BINS
from quantizer.observers.observed_batch import LowHigh, ObservedValues

_DEVIATIONS = 4


def mean_and_deviations(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the ends of each row's range, four standard deviations from its mean."""
    centres = torch.arange(-BINS, BINS, dtype=torch.float64) + 0.5
    shares = values.histogram / values.histogram.sum(1, keepdim=True)
    mean = values.width * (shares @ centres)
    mean_square = values.width.square() * (shares @ centres.square())
    reach = _DEVIATIONS * (mean_square - mean.square()).clamp(min=0).sqrt()
    low = torch.maximum(values.low.double(), mean - reach)
    high = torch.minimum(values.high.double(), mean + reach)
    return low, high
