"""The mse method: the clip with the least squared error, found on the histogram by one matrix product."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import fill
from quantizer.numerics.registry import register
from quantizer.numerics.rounding import NEAREST
from quantizer.observers.batch import BINS, Batch, Range
from quantizer.observers.methods import METHODS, code_range_of, kernel_of

STEPS_PER_OCTAVE = 16


@register(METHODS, "mse")
def mse(batch: Batch, spec: QuantizationSpec) -> Range:
    """Return the range cut at the clip that gives the least squared error with the spec's codes, both its sides.

    Which way ties go cannot matter: at a half-way point either neighbour has the same error.
    """
    number = {name: getattr(spec, name) for name in ("dtype", "bit_width", "signed", "narrow_range")}
    round_mode = "half_even" if spec.round_mode in NEAREST else spec.round_mode
    errors = batch.histogram @ _squared_errors(QuantizationSpec(**number, round_mode=round_mode)).T
    return batch.clipped(batch.amax * _clips()[errors.argmin(1)] / BINS)


def _clips() -> Tensor:
    """Clips to try, in bins: the centres 1536, 1552, ... of pytorch_nndct, the maximum, and 16 per octave below them.

    Low bit widths need those: at 2 bits the best clip of Gaussian data is 1.03 sigma, a quarter of the maximum.
    """
    upper = torch.arange(1536, BINS, 16, dtype=torch.float64) + 0.5
    octaves = torch.arange(7 * STEPS_PER_OCTAVE, 0, -1, dtype=torch.float64) / STEPS_PER_OCTAVE
    return torch.cat([upper[0] / 2**octaves, upper, torch.tensor([float(BINS)], dtype=torch.float64)])


@lru_cache(maxsize=16)
def _squared_errors(spec: QuantizationSpec) -> Tensor:
    """Return the squared error, in bins^2, of every bin's centre under every clip, (clips, 2 * BINS) float64.

    It depends on no data, so a histogram times this matrix gives the error of all clips at once.
    """
    centres = torch.arange(-BINS, BINS, dtype=torch.float64) + 0.5
    scale = (_clips() / code_range_of(spec).largest).float()
    values = centres.repeat(len(scale), 1)
    fill(values, values, scale, torch.zeros_like(scale), kernel_of(spec), ch_axis=0)
    return (values - centres).square_()
