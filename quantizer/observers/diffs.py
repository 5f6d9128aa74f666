"""The diffs method: the power of two with the least squared error, tried on the values themselves."""

from __future__ import annotations

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.fake_quantize import fake_quantize
from quantizer.numerics.qparams import qparams_from_range
from quantizer.numerics.registry import register
from quantizer.observers.batch import Batch, Range
from quantizer.observers.methods import METHODS, grid_of

FINER = 5  # candidates: the scale that cuts nothing off, and its half, quarter, ...: five in all, as in pytorch_nndct


@register(METHODS, "diffs")
def diffs(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range halved as often (0 to 4 times) as the squared error falls; of equal errors the widest range."""
    grid, errors = grid_of(spec), []
    for halvings in range(FINER):
        qparams = qparams_from_range(batch.low / 2**halvings, batch.high / 2**halvings, grid)
        scale, zero_point = qparams.scale.to(batch.sample), qparams.zero_point.to(batch.sample.device)
        values = fake_quantize(batch.sample, scale, zero_point, grid.quant_min, grid.quant_max, spec.round_mode, 0)
        errors.append(values.sub_(batch.sample).square_().sum(1, dtype=torch.float64))
    best = torch.stack(errors).argmin(0).cpu()
    return batch.low / 2.0**best, batch.high / 2.0**best
