"""Range methods that read the values of a batch: the errors are those of the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.formats import POWERS_OF_TWO, SMALLEST_SCALE, CodeRange
from quantizer.numerics.group_search import SearchedFormat, searched_scales
from quantizer.numerics.integer import LARGEST_PAIR_SUM, largest_pair_sums
from quantizer.numerics.qparams import qparams_from_range
from quantizer.observers.least_error import halvings, least_power
from quantizer.observers.methods import code_range_of, round_rows, searched_format
from quantizer.observers.observed_batch import LowHigh, ObservedBatch, ObservedValues

# Sixteenths of an octave to cut off from the range of a group; negative ones widen it. All from
# -4 to 16 gain less than 0.1 dB at 4 and 5 bits, in groups of 32 or 128 normal values
_GROUP_STEPS = (0, 2, 4, 8, -1, -2)
_GROUP_FACTORS = tuple(2 ** (-step / 16) for step in _GROUP_STEPS)
# How often the best range is fitted to its codes again; more gain less than 0.01 dB
_GROUP_REFITS = 2


_ROUNDING = 2**-20
"""More than the rounding errors of a scale and of a division by it."""
_DIFFS_SAMPLE_SIZE = 1 << 15
"""A small sample: every value is quantized five times, and the candidates are far apart."""
_DIFFS_CANDIDATES = 5
"""The scale that clips nothing, and 1/2, 1/4, 1/8 and 1/16 of it, as in pytorch_nndct."""


def diffs(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the range with the least squared error: the whole one, or 1/2, 1/4, 1/8 or 1/16 of
    it. If several have the same error, return the widest.
    """
    # `Observer` refuses this method for all batches together
    assert isinstance(values, ObservedBatch)
    sample = values.sample(_DIFFS_SAMPLE_SIZE)
    factors = halvings(_DIFFS_CANDIDATES, values.low.device)
    low = (values.low * factors[:, None]).view(-1)
    high = (values.high * factors[:, None]).view(-1)
    qparams = qparams_from_range(low, high, code_range_of(spec)).to(sample.device)
    quantized = sample.new_empty(_DIFFS_CANDIDATES, *sample.shape).copy_(sample)
    rows = quantized.view(-1, sample.shape[1])
    round_rows(rows, qparams.scale.to(sample.dtype), qparams.zero_point, spec)
    errors = quantized.sub_(sample).square_().sum(2)
    best = factors[errors.argmin(0).to(factors.device)]
    return values.low * best, values.high * best


def pair_safe(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return the smallest range of a weight, or of each of its output channels, in which the
    codes of two neighbouring inputs add up to at most LARGEST_PAIR_SUM. Nothing is cut off.
    With scales along another axis it is the whole range.

    x86 processors without VNNI add the products of two neighbours in 16 bits. If the largest
    sum of two weights is less than 128 steps, that of their codes is at most 128: it is a whole
    number, and rounding adds at most one step. A range is at most twice as wide as without the
    limit.
    """
    # `Observer` refuses this method for all batches together
    assert isinstance(values, ObservedBatch)
    weight = values.tensor
    has_scale_of_outputs = spec.qscheme == "per_channel" and spec.ch_axis == 0
    if weight is None or weight.dim() < 2 or not (spec.has_one_scale or has_scale_of_outputs):
        return values.low, values.high
    # The sum of two halves is a float32, too
    halves = weight.float() / 2
    sums = largest_pair_sums(halves)
    if weight.dim() == 4 and weight.shape[1] == 3:
        # A file may add a fourth input channel of zeros, and then no pair spans two positions
        padded = torch.nn.functional.pad(halves, (0, 0, 0, 0, 0, 1))
        sums = torch.maximum(sums, largest_pair_sums(padded))
    if spec.has_one_scale:
        sums = sums.amax(0, keepdim=True)
    sums = sums.double().to(values.low.device)
    step = 2 * sums / LARGEST_PAIR_SUM * (1 + _ROUNDING)
    # Weights of zero have no range to widen
    factor = (step * code_range_of(spec).largest / values.amax).nan_to_num(1.0).clamp(min=1.0)
    return values.low * factor, values.high * factor


def group_mse(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return low and high (R,) of the range with the least squared error.

    Each row is a group of few values. So its error is that of the values themselves and not of
    a histogram. Formats of llama.cpp and scales of either sign have a search of their own,
    `searched_scales`. `least_error_ranges` tries ranges for others.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return least_power(values, spec)
    # `Observer` refuses this method for all batches together
    assert isinstance(values, ObservedBatch)
    searched = searched_format(spec)
    if searched is not None and spec.has_searched_scale:
        return searched_range(values, searched)
    return least_error_ranges(values, spec)


def least_error_ranges(values: ObservedBatch, spec: QuantizationSpec) -> LowHigh:
    """Return low and high (R,), float64, of the range of each group with the least squared
    error.

    Those of `_group_ranges` are tried, and each again with its scale fitted to the codes that
    it leads to, by least squares. Of equally good ones it is the first.
    """
    # The error does not depend on how a scale is stored
    spec = replace(spec, scale_type="float")
    # So that values in float64 lead to the same ranges as in float32
    sample = values.sample().float()
    best = _GroupRanges.unknown(values)
    for low, high in _group_ranges(values, code_range_of(spec)):
        ranges = _tried(sample, low, high, spec)
        best = best.better_of(ranges)
        best = best.better_of(_refitted(sample, ranges, spec))
    for _ in range(_GROUP_REFITS):
        best = best.better_of(_refitted(sample, best, spec))
    return best.low, best.high


def _refitted(sample: Tensor, ranges: _GroupRanges, spec: QuantizationSpec) -> _GroupRanges:
    """Return ranges with the scales that are best for their codes."""
    low = ranges.low * ranges.refit
    high = ranges.high * ranges.refit
    return _tried(sample, low, high, spec)


class _GroupRanges(NamedTuple):
    """Ranges of groups, float64 (R,) each.

    Attributes:
        low, high: their ends.
        error: the squared error of each group.
        refit: the factor of its scale that is best for its codes.
    """

    low: Tensor
    high: Tensor
    error: Tensor
    refit: Tensor

    @classmethod
    def unknown(cls, values: ObservedBatch) -> _GroupRanges:
        """Return the whole ranges of groups, with errors that any other is less than."""
        low = values.low.double()
        high = values.high.double()
        error = torch.full_like(low, torch.inf)
        refit = torch.ones_like(low)
        return cls(low, high, error, refit)

    def better_of(self, other: _GroupRanges) -> _GroupRanges:
        """Return the range of each group with the smaller error, its own of equally good
        ones.
        """
        is_less = other.error < self.error
        pairs = zip(self, other, strict=True)
        return _GroupRanges(*(theirs.where(is_less, ours) for ours, theirs in pairs))


def _tried(sample: Tensor, low: Tensor, high: Tensor, spec: QuantizationSpec) -> _GroupRanges:
    """Return ranges with the errors that they lead to."""
    code_range = code_range_of(spec)
    qparams = qparams_from_range(low, high, code_range)
    qparams = qparams.to(sample.device)
    rounded = sample.clone()
    round_rows(rounded, qparams.scale, qparams.zero_point, spec)
    products = sample * rounded
    product = products.sum(1).double()
    squares = rounded.square()
    square = squares.sum(1).double()
    ratio = product / square
    refit = ratio.where(product > 0, 1.0)
    errors = rounded.sub_(sample).square_()
    error = errors.sum(1).double()
    return _GroupRanges(low, high, error.to(low.device), refit.to(low.device))


def searched_range(values: ObservedBatch, searched: SearchedFormat) -> LowHigh:
    """Return low and high (R,), float64, of ranges that lead to the searched scales and minima
    exactly.
    """
    scale, minimum = searched_scales(values.rows, None, searched)
    scale = scale.double().cpu()
    row = searched.row
    if row.has_minimum:
        low = -minimum.double().cpu()
        return low, low + row.largest * scale
    # The value of the largest magnitude has the least code, with its sign
    outermost = row.levels[0] * scale
    return outermost.clamp(max=0), outermost.clamp(min=0)


def _group_ranges(values: ObservedBatch, code_range: CodeRange) -> Iterator[LowHigh]:
    """Yield the ranges to try, low and high of each group, float64 (R,), the whole one first.

    Rounding the zero point of an asymmetric range moves the range by up to half a step, which
    cuts something off at one end. So each range is also moved until zero is a code, once to
    either side.
    """
    low = values.low.double().clamp(max=0)
    high = values.high.double().clamp(min=0)
    if code_range.symmetric:
        for factor in _GROUP_FACTORS:
            yield low * factor, high * factor
        return
    yield low, high
    steps = code_range.span
    whole_step = (high - low) / steps
    for factor in _GROUP_FACTORS:
        step = (whole_step * factor).clamp(min=SMALLEST_SCALE)
        codes_below = -low / step
        for zero_point in (codes_below.floor(), codes_below.ceil()):
            zero_code = zero_point.clamp(max=steps)
            yield -zero_code * step, (steps - zero_code) * step
