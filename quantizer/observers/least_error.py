"""Range methods that try ranges and take the one with the least error."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from quantizer.config.model import AUTO_METHOD, QuantizationSpec
from quantizer.numerics.block_search import searched_scales
from quantizer.numerics.blocks import fill
from quantizer.numerics.code_range import (
    POWERS_OF_TWO,
    SHARED_EXPONENTS,
    SMALLEST_SCALE,
    CodeRange,
)
from quantizer.numerics.histogram import BINS
from quantizer.numerics.qparams import qparams_from_range, symmetric_step, uncut
from quantizer.numerics.registry import register_in
from quantizer.numerics.rounding import NEAREST
from quantizer.numerics.weighted_groups import SearchedFormat
from quantizer.observers.methods import (
    CENTRES,
    RANGE_METHODS,
    code_range_of,
    kernel_of,
    searched_format,
)
from quantizer.observers.observed_batch import (
    LowHigh,
    ObservedBatch,
    ObservedValues,
    PooledBatches,
)

_MSE_STEPS_PER_OCTAVE = 16
# Sixteenths of an octave to cut off from the range of a group. More of them gain less than
# 0.02 dB at 4 and 5 bits
_GROUP_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, -1)
_GROUP_FACTORS = tuple(2 ** (-step / 16) for step in _GROUP_STEPS)
# Factors on the range if scales are powers of two
_HALVINGS = tuple(0.5**halvings for halvings in range(8))
# Octaves to cut off, first from the extremes, then around the best ends so far
_AUTO_STEPS = (torch.arange(12) / 2, torch.arange(-3, 4) / 8, torch.arange(-1, 2) / 16)
# Octaves by which an end may lie beyond the extreme
_AUTO_WIDER = 0.5
_AUTO_POWER = 2.2
_AUTO_RANGES_AT_ONCE = 128
# The distances between so many of the greatest values estimate how far a new one exceeds them
_OUTERMOST = 3


@register_in(RANGE_METHODS, "mse")
def mse(
    values: ObservedValues,
    spec: QuantizationSpec,
) -> LowHigh:
    """Return the range that gives the least squared error with the spec's codes, of those that
    lead to different scales.

    A range whose scale may be any float is cut at the best clip, on both sides, or widened
    until it cuts nothing off. A range whose scale is a power of two is halved as often as the
    error falls. It does not matter how ties are rounded: both neighbours of a half-way point
    have the same error.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return _least_power(values, spec)
    round_mode = "half_even" if spec.round_mode in NEAREST else spec.round_mode
    # Specs that agree in what the errors depend on share a cached table
    codes = QuantizationSpec(
        dtype=spec.dtype,
        bit_width=spec.bit_width,
        signed=spec.signed,
        narrow_range=spec.narrow_range,
        symmetric_scale=spec.symmetric_scale,
        round_mode=round_mode,
    )
    clip = _clips(codes)[_errors(values, codes).argmin(1)]
    low, high = values.clipped(values.amax * clip / BINS)
    widening = (clip / BINS).clamp(min=1)
    return low * widening, high * widening


@register_in(RANGE_METHODS, AUTO_METHOD)
def auto(
    values: ObservedValues,
    spec: QuantizationSpec,
) -> LowHigh:
    """Return the range of the least error, of all ranges that the other methods could give. An
    error counts by its power 2.2.

    The ranges of maxmin, percentile and mse have ends nearer to zero than the extremes, or
    equal to them. All pairs of ends are tried, in steps of half an octave and then of down to a
    sixteenth. A one-sided tensor has one end to cut. A tail on one side costs the other
    nothing. The ends of a symmetric range are cut alike. If scales are powers of two, mse tries
    every range there is.

    For the data of a calibration an end may also be up to half an octave beyond the extreme.
    New values will be outside, on average as many as were seen once, as far as the outermost
    ones are apart. Among the few values of a pooled tensor one value that is cut off counts
    more than wider steps. All values of a weight are known.

    Errors of a layer's inputs are about independent, so the least error of one range is the
    least at the layer's output. With squared errors, the few large values on which the
    attention of a transformer depends would count for too little: a sentence encoder loses 1.6
    dB to maxmin. With the power 2.2 it gains 0.3 dB, and convolutional networks lose 0.2 of the
    1 to 2 dB that they gain.

    Source: Li et al., "BRECQ", 2021, whose code searches scales by the power 2.4; for excesses
    Pickands, "Statistical inference using extreme order statistics", 1975.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return mse(values, spec)
    if spec.symmetric:
        extremes = torch.stack([-values.amax, values.amax]).double()
    else:
        extremes = torch.stack([values.low, values.high]).double()
    has_new_values = isinstance(values, PooledBatches)
    rows = zip(extremes.T, values.width, values.histogram, strict=True)
    ranges = []
    for row_extremes, width, histogram in rows:
        occupied = histogram.nonzero().squeeze(1)
        centres = (width * CENTRES[occupied]).clamp(*row_extremes)
        counts = histogram[occupied]
        excess = torch.zeros(2, dtype=torch.float64)
        if has_new_values:
            excess = _excess(centres, counts, symmetric=spec.symmetric)
        ranges.append(
            _best_ends(
                row_extremes[:, None],
                excess,
                centres,
                counts,
                spec=spec,
            )
        )
    low, high = torch.stack(ranges).T
    return low, high


def _best_ends(
    extremes: Tensor,
    excess: Tensor,
    centres: Tensor,
    counts: Tensor,
    *,
    spec: QuantizationSpec,
) -> Tensor:
    """Return low and high (2,) with the least error of a row of `counts` values at `centres`,
    whose `extremes` are (2, 1).
    """
    octaves = torch.zeros(2, 1, dtype=torch.float64)
    for steps in _AUTO_STEPS:
        candidates = _pairs(octaves[:, 0], steps, extremes, alike=spec.symmetric)
        errors = []
        for part in torch.split(candidates, _AUTO_RANGES_AT_ONCE, dim=1):
            errors.append(_error_of(extremes * 0.5**part, centres, counts, spec))
        error_beyond = _error_beyond(extremes * 0.5**candidates, extremes, excess)
        best = int((torch.cat(errors) + error_beyond).argmin())
        octaves = candidates[:, best : best + 1]
    return (extremes * 0.5**octaves)[:, 0]


def _pairs(
    octaves: Tensor,
    steps: Tensor,
    extremes: Tensor,
    *,
    alike: bool,
) -> Tensor:
    """Return the octaves to cut off from low and high, (2, N): all pairs of `steps` around
    `octaves`.
    """
    low = torch.unique((octaves[0] + steps).clamp(min=-_AUTO_WIDER))
    if alike:
        return torch.stack([low, low])
    high = torch.unique((octaves[1] + steps).clamp(min=-_AUTO_WIDER))
    # An end at zero stays there
    if extremes[0] == 0:
        low = low[:1]
    if extremes[1] == 0:
        high = high[:1]
    return torch.cartesian_prod(low, high).T


def _excess(
    centres: Tensor,
    counts: Tensor,
    *,
    symmetric: bool,
) -> Tensor:
    """Return how far a new value beyond either extreme is from it on average, (2,). A
    symmetric range has one extreme.
    """
    if symmetric:
        excess = _mean_excess(centres.abs(), counts)
        return torch.stack([excess, torch.zeros_like(excess)])
    return torch.stack([_mean_excess(-centres, counts), _mean_excess(centres, counts)])


def _mean_excess(
    values: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return how far the greatest values are above the last of them on average. Values below 0
    count as 0.

    >>> _mean_excess(torch.tensor([5.0, 9.0, 8.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 7.0]))
    tensor(3.5000)
    """
    order = values.argsort(descending=True)
    ranks = torch.arange(1, _OUTERMOST + 1).to(counts)
    index = torch.searchsorted(counts[order].cumsum(0), ranks)
    outermost = values[order][index.clamp(max=len(values) - 1)].clamp(min=0)
    return (outermost[:-1] - outermost[-1]).mean()


def _error_beyond(
    ends: Tensor,
    extremes: Tensor,
    excess: Tensor,
) -> Tensor:
    """Return the error (N,) of new values beyond ranges `ends` (2, N), one at either end among
    as many values as were seen.

    Such a value is exponentially far beyond the extreme, and the power p of an exponential
    has the mean gamma(p + 1) mean^p.
    """
    widening = (ends.abs() - extremes.abs()).clamp(min=0)
    mean = excess.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    share_beyond = torch.exp(-widening / mean)
    return math.gamma(_AUTO_POWER + 1) * (excess**_AUTO_POWER) @ share_beyond


def _error_of(
    ends: Tensor,
    centres: Tensor,
    counts: Tensor,
    spec: QuantizationSpec,
) -> Tensor:
    """Return the error (N,) of `counts` values at `centres` with ranges `ends` (2, N)."""
    qparams = qparams_from_range(ends[0], ends[1], code_range_of(spec))
    rounded = centres.repeat(ends.shape[1], 1)
    fill(
        rounded,
        rounded,
        kernel_of(spec),
        scale=qparams.scale,
        zero_point=qparams.zero_point,
        ch_axis=0,
    )
    return rounded.sub_(centres).abs_().pow_(_AUTO_POWER) @ counts


def _clips(spec: QuantizationSpec) -> Tensor:
    """Return the clips to try, in bins: the centres 1536, 1552, ... of pytorch_nndct, the
    maximum, and 16 per octave below them.

    Low bit widths need those: at 2 bits the best clip of Gaussian data is 1.03 sigma, a quarter
    of the maximum. If the spec's rule for symmetric scales cuts even the maximum, the scale
    that does not is tried too.
    """
    upper = torch.arange(1536, BINS, 16, dtype=torch.float64) + 0.5
    steps = torch.arange(7 * _MSE_STEPS_PER_OCTAVE, 0, -1, dtype=torch.float64)
    lower = upper[0] / 2 ** (steps / _MSE_STEPS_PER_OCTAVE)
    widest = sorted({1.0, uncut(code_range_of(spec))})
    return torch.cat([lower, upper, BINS * torch.tensor(widest, dtype=torch.float64)])


def _least_power(
    values: ObservedValues,
    spec: QuantizationSpec,
) -> LowHigh:
    """Return the range times the power of two with the least squared error. Of equal ones it is
    the widest.

    The errors are those of the bins' centres with the scales that the ranges lead to.
    """
    # Shared exponents may cut much off, so that a wider range may be better
    powers = (2.0, *_HALVINGS) if spec.scale_type in SHARED_EXPONENTS else _HALVINGS
    factors = torch.tensor(powers, dtype=torch.float64)
    low = values.low * factors[:, None]
    high = values.high * factors[:, None]
    qparams = qparams_from_range(low, high, code_range_of(spec))
    kernel = kernel_of(spec)
    centres = values.width[:, None] * CENTRES
    errors = []
    for scale, zero_point in zip(qparams.scale, qparams.zero_point, strict=True):
        rounded = torch.empty_like(centres)
        fill(
            rounded,
            centres,
            kernel,
            scale=scale,
            zero_point=zero_point,
            ch_axis=0,
        )
        errors.append(rounded.sub_(centres).square_().mul_(values.histogram).sum(1))
    best = factors[torch.stack(errors).argmin(0)]
    return values.low * best, values.high * best


@register_in(RANGE_METHODS, "group_mse")
def group_mse(
    values: ObservedValues,
    spec: QuantizationSpec,
) -> LowHigh:
    """Return the range that gives the least squared error, of those of `_group_ranges`. Of
    equal ones it is the first.

    Groups have few values. So their errors are those of the values themselves and not of a
    histogram, and an asymmetric range gets the better of the two zero points around its end.
    Formats of llama.cpp and scales of either sign have a search of their own,
    `searched_scales`.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return _least_power(values, spec)
    # `Observer` refuses this method for all batches together
    assert isinstance(values, ObservedBatch)
    searched = searched_format(spec)
    if searched is not None and spec.has_searched_scale:
        return _searched_range(values, searched)
    # The error does not depend on how a scale is stored
    spec = replace(spec, scale_type="float")
    code_range = code_range_of(spec)
    kernel = kernel_of(spec)
    sample = values.sample()
    best_low = values.low.double()
    best_high = values.high.double()
    least = torch.full_like(best_low, torch.inf)
    for low, high in _group_ranges(values, code_range):
        qparams = qparams_from_range(low, high, code_range).to(sample.device)
        rounded = torch.empty_like(sample)
        fill(
            rounded,
            sample,
            kernel,
            scale=qparams.scale.to(sample.dtype),
            zero_point=qparams.zero_point,
            ch_axis=0,
        )
        squares = rounded.sub_(sample).square_()
        error = squares.sum(1).double().cpu()
        is_less = error < least
        least = torch.where(is_less, error, least)
        best_low = torch.where(is_less, low, best_low)
        best_high = torch.where(is_less, high, best_high)
    return best_low, best_high


def _searched_range(
    values: ObservedBatch,
    searched: SearchedFormat,
) -> LowHigh:
    """Return the range from which the found scales and minima follow exactly, float64."""
    scale, minimum = searched_scales(values.rows, None, searched)
    scale = scale.double().cpu()
    row = searched.row
    if row.has_minimum:
        low = -minimum.double().cpu()
        return low, low + row.largest * scale
    # The value of the largest magnitude has the least code, with its sign
    outermost = row.levels[0] * scale
    return outermost.clamp(max=0), outermost.clamp(min=0)


def _group_ranges(
    values: ObservedBatch,
    code_range: CodeRange,
) -> Iterator[LowHigh]:
    """Yield the ranges to try for each group, float64, the whole one first.

    An asymmetric range that leads to a rounded zero point is cut off at one end, by up to half
    a step. So each range is also moved until zero is a code, to both sides.
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


def _errors(
    values: ObservedValues,
    codes: QuantizationSpec,
) -> Tensor:
    """Return the squared error of each row with every clip, up to a factor of the row, (R,
    clips).
    """
    if not isinstance(values, PooledBatches):
        # The bins end at amax
        return values.histogram @ _squared_errors(codes).T
    stretches = values.width * BINS / values.amax.clamp(min=1e-300)
    errors = []
    for counts, stretch in zip(values.histogram, stretches, strict=True):
        occupied = counts.nonzero().squeeze(1)
        errors.append(_errors_at(CENTRES[occupied] * stretch, codes) @ counts[occupied])
    return torch.stack(errors)


@lru_cache(maxsize=16)
def _squared_errors(spec: QuantizationSpec) -> Tensor:
    """Return the squared error, in bins^2, of every bin's centre with every clip, (clips, 2 *
    BINS) float64.

    It depends on no data, so a histogram times this matrix gives the error of all clips at
    once.
    """
    return _errors_at(CENTRES, spec)


def _errors_at(
    centres: Tensor,
    spec: QuantizationSpec,
) -> Tensor:
    """Return the squared errors of some centres (N,), in bins, with every clip, (clips, N)."""
    scale = symmetric_step(_clips(spec), code_range_of(spec)).float()
    zero_point = torch.zeros_like(scale)
    values = centres.repeat(len(scale), 1)
    fill(
        values,
        values,
        kernel_of(spec),
        scale=scale,
        zero_point=zero_point,
        ch_axis=0,
    )
    return (values - centres).square_()
