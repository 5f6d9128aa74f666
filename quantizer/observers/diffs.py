"""The diffs method: the power of two with the least squared error, tried on the values themselves."""

from __future__ import annotations

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import fill
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.registry import register
from quantizer.observers.batch import Batch, Range
from quantizer.observers.methods import METHODS, code_range_of, kernel_of

SAMPLE = 1 << 15  # every value is quantized five times, and the candidates lie far apart
CANDIDATES = 5  # the scale that cuts nothing off, and its half, quarter, ...: five in all, as in pytorch_nndct


@register(METHODS, "diffs")
def diffs(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range halved as often (0 to 4 times) as the squared error falls; of equal errors the widest range."""
    code_range, kernel, sample, errors = code_range_of(spec), kernel_of(spec), batch.sample(SAMPLE), []
    factors = 0.5 ** torch.arange(CANDIDATES, dtype=torch.float64)
    qparams = qparams_from_range(batch.low * factors[:, None], batch.high * factors[:, None], code_range)
    for scale, zero_point in zip(qparams.scale.to(sample), qparams.zero_point.to(sample.device), strict=True):
        values = fill(torch.empty_like(sample), sample, scale, zero_point, kernel, 0)
        errors.append(values.sub_(sample).square_().sum(1, dtype=torch.float64))
    best = factors[torch.stack(errors).argmin(0).cpu()]
    return batch.low * best, batch.high * best
