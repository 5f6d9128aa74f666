"""Range methods that try ranges and take the one with the least error.

R is the number of rows of a tensor. Each row has a range (low, high) and a histogram around 0.
`CENTRES` (2 * BINS,) has the centres of its bins, in widths of a bin.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.formats import POWERS_OF_TWO, SHARED_EXPONENTS
from quantizer.numerics.histogram import BINS
from quantizer.numerics.qparams import qparams_from_range, symmetric_step, uncut
from quantizer.numerics.rounding import NEAREST
from quantizer.observers.methods import CENTRES, code_range_of, round_rows
from quantizer.observers.observed_batch import LowHigh, ObservedValues, PooledBatches

_MSE_STEPS_PER_OCTAVE = 16
# How many factors the range is multiplied by if scales are powers of two
_HALVINGS = 8
# Octaves to cut off in each round of `auto`, from the best ends of the round before. An end of
# o octaves is the extreme times 0.5**o
_AUTO_STEPS = (torch.arange(12) / 2, torch.arange(-3, 4) / 8, torch.arange(-1, 2) / 16)
# Octaves by which an end may be beyond the extreme
_MOST_WIDENING = 0.5
# The error of a value counts by this power
_AUTO_POWER = 2.2
# Each range needs a copy of all bins, so that this bounds the memory
_AUTO_RANGES_AT_ONCE = 128
# How many of the greatest values are read to estimate how far a new value exceeds them
_OUTERMOST = 3


def mse(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return low and high (R,) of the range with the least squared error of the spec's codes.

    If a scale may be any float, the range is cut at the best clip of `_clips`, on both sides,
    or widened until it cuts nothing off. If scales are powers of two, the range is multiplied
    by the best power of two.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return least_power(values, spec)
    # Both neighbours of a half-way point have the same error, so ties may be rounded either way
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
    best = _errors(values, codes).argmin(1)
    clip = _clips(codes)[best]
    low, high = values.clipped(values.amax * clip / BINS)
    widening = (clip / BINS).clamp(min=1)
    return low * widening, high * widening


def auto(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return low and high (R,) of the range with the least error, of all ranges that the other
    methods could give. An error counts by its power 2.2.

    Pairs of ends are tried, nearer to zero than the extremes or equal to them: first in steps
    of half an octave, then of an eighth and a sixteenth around the best pair. Each end is cut
    on its own, so that a tail on one side costs the other nothing. An end at zero stays there.
    The ends of a symmetric range are cut alike. If scales are powers of two, mse tries every
    range there is.

    For the data of a calibration an end may also be up to half an octave beyond the extreme.
    New data will have values outside: on average one at either end among as many values as were
    seen. How far outside follows from the distances between the outermost values, see
    `_error_beyond`. This matters for tensors of few values, where one value that is cut off
    counts more than wider steps. All values of a weight are known.

    Errors of a layer's inputs are about independent, so the least error of one range is the
    least at the layer's output. Squared errors would count the few large values too little that
    the attention of a transformer depends on. With them a sentence encoder loses 1.6 dB to
    maxmin. With the power 2.2 it gains 0.3 dB. Convolutional networks then gain 0.2 dB less, of
    1 to 2 dB.

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
            excess = _excesses(centres, counts, symmetric=spec.symmetric)
        ranges.append(_best_ends(row_extremes[:, None], excess, centres, counts, spec=spec))
    low, high = torch.stack(ranges).T
    return low, high


def _best_ends(
    extremes: Tensor, excess: Tensor, centres: Tensor, counts: Tensor, *, spec: QuantizationSpec
) -> Tensor:
    """Return low and high of the range with the least error for one row, float64 (2,).

    Args:
        extremes: the least and the greatest value, float64 (2, 1).
        excess: how far a new value is beyond each of them on average, (2,); 0 without new ones.
        centres: the values, those of occupied bins (N,).
        counts: how many values there are of each, (N,).
        spec: of the codes.
    """
    octaves = torch.zeros(2, 1, dtype=torch.float64)
    for steps in _AUTO_STEPS:
        candidates = _pairs(octaves[:, 0], steps, extremes, alike=spec.symmetric)
        errors = []
        for part in torch.split(candidates, _AUTO_RANGES_AT_ONCE, dim=1):
            ends = extremes * 0.5**part
            error = _error_of(ends, centres, counts, spec)
            errors.append(error)
        ends = extremes * 0.5**candidates
        error_beyond = _error_beyond(ends, extremes, excess)
        error = torch.cat(errors) + error_beyond
        best = int(error.argmin())
        octaves = candidates[:, best : best + 1]
    return (extremes * 0.5**octaves)[:, 0]


def _pairs(octaves: Tensor, steps: Tensor, extremes: Tensor, *, alike: bool) -> Tensor:
    """Return the octaves to try for low and high, (2, N): all pairs of `octaves` plus `steps`.

    Args:
        octaves: what the best range so far cuts off from low and high, (2,).
        steps: what to add to them, (S,).
        extremes: the least and the greatest value, (2, 1).
        alike: whether both ends are cut by the same octaves.
    """
    low = octaves[0] + steps
    low = torch.unique(low.clamp(min=-_MOST_WIDENING))
    if alike:
        return torch.stack([low, low])
    high = octaves[1] + steps
    high = torch.unique(high.clamp(min=-_MOST_WIDENING))
    # An end at zero stays there
    if extremes[0] == 0:
        low = low[:1]
    if extremes[1] == 0:
        high = high[:1]
    return torch.cartesian_prod(low, high).T


def _excesses(centres: Tensor, counts: Tensor, *, symmetric: bool) -> Tensor:
    """Return how far a new value beyond the least and the greatest one is from it on average,
    (2,). For a symmetric range, the first is for magnitudes, and the second is 0.
    """
    if symmetric:
        excess = _mean_excess(centres.abs(), counts)
        return torch.stack([excess, torch.zeros_like(excess)])
    below = _mean_excess(-centres, counts)
    above = _mean_excess(centres, counts)
    return torch.stack([below, above])


def _mean_excess(values: Tensor, counts: Tensor) -> Tensor:
    """Return how far the greatest values are above the last of them on average, of the
    `_OUTERMOST` greatest. Values below 0 count as 0.

    The three greatest values of this example are 9, 8 and 5:

    >>> _mean_excess(torch.tensor([5.0, 9.0, 8.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 7.0]))
    tensor(3.5000)
    """
    order = values.argsort(descending=True)
    # A bin may hold several of the greatest values
    ranks = torch.arange(1, _OUTERMOST + 1).to(counts)
    index = torch.searchsorted(counts[order].cumsum(0), ranks)
    index = index.clamp(max=len(values) - 1)
    outermost = values[order][index]
    outermost = outermost.clamp(min=0)
    return (outermost[:-1] - outermost[-1]).mean()


def _error_beyond(ends: Tensor, extremes: Tensor, excess: Tensor) -> Tensor:
    """Return the mean error (N,) of two new values with ranges `ends` (2, N), one beyond either
    extreme (2, 1).

    The distance of a new value from the extreme has an exponential distribution of the mean
    `excess` (2,). With the probability exp(-widening / mean) it exceeds a widened range. What
    exceeds the range has the same distribution, and its power p the mean gamma(p + 1) mean^p.
    """
    widening = (ends.abs() - extremes.abs()).clamp(min=0)
    mean = excess.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    share_beyond = torch.exp(-widening / mean)
    return math.gamma(_AUTO_POWER + 1) * (excess**_AUTO_POWER) @ share_beyond


def _error_of(ends: Tensor, centres: Tensor, counts: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return the sum of errors (N,) of `counts` values at `centres`, for N ranges (2, N)."""
    qparams = qparams_from_range(ends[0], ends[1], code_range_of(spec))
    rounded = centres.repeat(ends.shape[1], 1)
    round_rows(rounded, qparams.scale, qparams.zero_point, spec)
    errors = rounded.sub_(centres).abs_()
    return errors.pow_(_AUTO_POWER) @ counts


def _clips(spec: QuantizationSpec) -> Tensor:
    """Return the magnitudes to clip at, in units of a bin, float64 (clips,), the least first.

    They are the clips of pytorch_nndct, which are the centres of the bins 1536, 1552 and so on,
    16 per octave over 7 octaves below them, and the maximum. Low bit widths need those below:
    at 2 bits the best clip of Gaussian data is 1.03 sigma, a quarter of the maximum. If the
    spec's rule for symmetric scales cuts even the maximum, the range that does not is tried
    too.
    """
    upper = torch.arange(1536, BINS, 16, dtype=torch.float64) + 0.5
    steps = torch.arange(7 * _MSE_STEPS_PER_OCTAVE, 0, -1, dtype=torch.float64)
    lower = upper[0] / 2 ** (steps / _MSE_STEPS_PER_OCTAVE)
    widest = sorted({1.0, uncut(code_range_of(spec))})
    return torch.cat([lower, upper, BINS * torch.tensor(widest, dtype=torch.float64)])


def least_power(values: ObservedValues, spec: QuantizationSpec) -> LowHigh:
    """Return low and high (R,) of the range, times the power of two with the least squared
    error. Of equally good powers it is the greatest.

    The errors are those of the bins' centres with the scales that the ranges lead to.
    """
    device = values.low.device
    factors = halvings(_HALVINGS, device)
    if spec.scale_type in SHARED_EXPONENTS:
        # Their rule may cut much off, so that a wider range may be better
        factors = 2 * halvings(_HALVINGS + 1, device)
    low = values.low * factors[:, None]
    high = values.high * factors[:, None]
    qparams = qparams_from_range(low, high, code_range_of(spec))
    bins = torch.arange(-BINS, BINS, dtype=torch.float64, device=device)
    centres = values.width[:, None] * (bins + 0.5)
    errors = []
    for scale, zero_point in zip(qparams.scale, qparams.zero_point, strict=True):
        rounded = centres.clone()
        round_rows(rounded, scale, zero_point, spec)
        squares = rounded.sub_(centres).square_()
        weighted = squares.mul_(values.histogram)
        errors.append(weighted.sum(1))
    best = factors[torch.stack(errors).argmin(0)]
    return values.low * best, values.high * best


def halvings(count: int, device: torch.device) -> Tensor:
    """Return 1, 1/2, 1/4 and so on, `count` factors, float64.

    >>> halvings(3, torch.device("cpu")).tolist()
    [1.0, 0.5, 0.25]
    """
    # Integers have exact powers on every device
    powers = 2 ** torch.arange(count, device=device)
    return powers.double().reciprocal()


def _errors(values: ObservedValues, codes: QuantizationSpec) -> Tensor:
    """Return the squared error of each row with every clip, float64 (R, clips), in a unit that
    only depends on the row.
    """
    if not isinstance(values, PooledBatches):
        # The bins end at amax
        return values.histogram @ _squared_errors(codes).T
    # The bins of a pool may end beyond amax. Their centres are here in units of amax / BINS
    stretches = values.width * BINS / values.amax.clamp(min=1e-300)
    errors = []
    for counts, stretch in zip(values.histogram, stretches, strict=True):
        occupied = counts.nonzero().squeeze(1)
        centres = CENTRES[occupied] * stretch
        by_clip = _errors_at(centres, codes)
        errors.append(by_clip @ counts[occupied])
    return torch.stack(errors)


@lru_cache(maxsize=16)
def _squared_errors(spec: QuantizationSpec) -> Tensor:
    """Return the squared error of every bin's centre with every clip, in squared widths of a
    bin, float64 (clips, 2 * BINS).

    It depends on no data. So a histogram times this matrix gives the error of all clips.
    """
    return _errors_at(CENTRES, spec)


def _errors_at(centres: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return the squared errors (clips, N) of `centres` (N,) with every clip, in widths of a
    bin.
    """
    scale = symmetric_step(_clips(spec), code_range_of(spec)).float()
    zero_point = torch.zeros_like(scale)
    values = centres.repeat(len(scale), 1)
    round_rows(values, scale, zero_point, spec)
    return (values - centres).square_()
