"""The diffs method: the power of two with the least squared error, tried on the values themselves."""

from __future__ import annotations

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.fake_quantize import fake_quantize
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.registry import register
from quantizer.observers.batch import Batch, Range
from quantizer.observers.methods import METHODS, grid_of

SAMPLE = 1 << 16  # every value is quantized five times, and the candidates lie far apart
CANDIDATES = 5  # the scale that cuts nothing off, and its half, quarter, ...: five in all, as in pytorch_nndct


@register(METHODS, "diffs")
def diffs(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range halved as often (0 to 4 times) as the squared error falls; of equal errors the widest range."""
    grid, sample, errors = grid_of(spec), batch.sample(SAMPLE), []
    for halvings in range(CANDIDATES):
        qparams = qparams_from_range(batch.low / 2**halvings, batch.high / 2**halvings, grid)
        scale, zero_point = qparams.scale.to(sample), qparams.zero_point.to(sample.device)
        values = fake_quantize(sample, scale, zero_point, grid.quant_min, grid.quant_max, spec.round_mode, 0)
        errors.append(values.sub_(sample).square_().sum(1, dtype=torch.float64))
    best = torch.stack(errors).argmin(0).cpu()
    return batch.low / 2.0**best, batch.high / 2.0**best
