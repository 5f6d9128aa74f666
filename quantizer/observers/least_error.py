"""Range methods that try ranges and take the one with the least squared error."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from quantizer.config.model import AUTO, QuantizationSpec
from quantizer.numerics.blocks import fill
from quantizer.numerics.histogram import BINS
from quantizer.numerics.qparams import (
    POWERS_OF_TWO,
    SHARED,
    qparams_from_range,
    symmetric_step,
    uncut,
)
from quantizer.numerics.registry import register
from quantizer.numerics.rounding import NEAREST
from quantizer.observers.methods import CENTRES, METHODS, code_range_of, kernel_of
from quantizer.observers.observed_batch import Distribution, PooledBatches, Range

MSE_STEPS_PER_OCTAVE = 16
AUTO_STEPS = torch.arange(12) / 2, torch.arange(-3, 4) / 8, torch.arange(-1, 2) / 16
"""Octaves to cut off, first from the extremes, then around what was best."""
AUTO_WIDER = 0.5
"""Octaves by which an end may lie beyond the extreme."""
AUTO_POWER = 2.2
OUTERMOST = 3
"""Values that tell how far apart those at an end lie."""
PAIRS_AT_ONCE = 128
POWERS = (2.0, *(0.5**halvings for halvings in range(8)))
"""Factors on the range where scales are powers of two; a wider one is for shared exponents,
which may cut much off.
"""


@register(METHODS, "mse")
def mse(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range that gives the least squared error with the spec's codes, of those that
    lead to other scales.

    Where the scale may be any float, the range is cut at the best clip, both its sides, or
    widened to what cuts nothing off; where it is a power of two, halved as often as the error
    falls. Which way ties go cannot matter: at a half-way point either neighbour has the same
    error.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return _least_power(values, spec)
    words = ("dtype", "bit_width", "signed", "narrow_range", "symmetric_scale")
    round_mode = "half_even" if spec.round_mode in NEAREST else spec.round_mode
    codes = QuantizationSpec(
        **{name: getattr(spec, name) for name in words}, round_mode=round_mode
    )
    clip = _clips(codes)[_errors(values, codes).argmin(1)]
    low, high = values.clipped(values.amax * clip / BINS)
    wider = (clip / BINS).clamp(min=1)
    return low * wider, high * wider


@register(METHODS, AUTO)
def auto(values: Distribution, spec: QuantizationSpec) -> Range:
    """Return the range of the least error, of all that the other methods might find; errors
    count by their power 2.2.

    What maxmin, percentile and mse cut off are ends nearer to zero than the extremes. All pairs
    of ends are tried, in steps of half an octave and then of down to a sixteenth: a one-sided
    tensor has one end to cut, and a tail on one side costs the other nothing. The ends of a
    symmetric range are cut alike; where scales are powers of two, mse tries all that there can
    be.

    Of what calibration sees, an end may also lie up to half an octave beyond the extreme: as
    many new values have one outside on average, as far as the outermost ones lie apart, and
    among the few values of a pooled tensor one that is cut off counts more than wider steps. Of
    a weight, all values are known.

    Errors of a layer's inputs are about independent, so the least of one range is the least at
    the layer's output. By their square, the few large values that the attention of a
    transformer hangs on would still count for too little: a sentence encoder loses 1.6 dB to
    maxmin, and gains .3 with the power 2.2, which costs convolutional networks .2 of the 1 to 2
    dB that they gain.

    Source: Li et al., "BRECQ", 2021, whose code searches scales by the power 2.4; for excesses
    Pickands, "Statistical inference using extreme order statistics", 1975.
    """
    if spec.scale_type in POWERS_OF_TWO:
        return mse(values, spec)
    extremes = torch.stack(
        [-values.amax, values.amax] if spec.symmetric else [values.low, values.high]
    ).double()
    rows = zip(extremes.T, values.width, values.histogram, strict=True)
    is_part = isinstance(values, PooledBatches)
    low, high = torch.stack(
        [
            _least_ends(ends[:, None], width, counts, spec, is_part)
            for ends, width, counts in rows
        ]
    ).T
    return low, high


def _least_ends(
    extremes: Tensor, width: Tensor, counts: Tensor, spec: QuantizationSpec, is_part: bool
) -> Tensor:
    """Low and high of one row, whose `extremes` are (2, 1), set as is best: (2,)."""
    occupied = counts.nonzero().squeeze(1)
    exact, counts = (width * CENTRES[occupied]).clamp(*extremes[:, 0]), counts[occupied]
    excess = (
        _excess(exact, counts, symmetric=spec.symmetric)
        if is_part
        else torch.zeros(2, dtype=torch.float64)
    )
    best = torch.zeros(2, 1, dtype=torch.float64)  # octaves cut off from either end
    for steps in AUTO_STEPS:
        pairs = _pairs(best[:, 0], steps, extremes, alike=spec.symmetric)
        parts = torch.split(pairs, PAIRS_AT_ONCE, dim=1)
        errors = torch.cat(
            [_error_of(extremes * 0.5**part, exact, counts, spec) for part in parts]
        )
        at = int((errors + _error_beyond(extremes * 0.5**pairs, extremes, excess)).argmin())
        best = pairs[:, at : at + 1]
    return (extremes * 0.5**best)[:, 0]


def _pairs(around: Tensor, steps: Tensor, extremes: Tensor, *, alike: bool) -> Tensor:
    """Octaves to cut off from low and high, (2, N): all of `steps` around those, but for an end
    that is zero.
    """
    tried = [(start + steps).clamp(min=-AUTO_WIDER).unique() for start in around]
    if alike:
        return torch.stack([tried[0], tried[0]])
    tried = [
        some if end else some[:1]
        for some, end in zip(tried, extremes[:, 0].tolist(), strict=True)
    ]
    return torch.cartesian_prod(*tried).T


def _excess(exact: Tensor, counts: Tensor, *, symmetric: bool) -> Tensor:
    """How far a new value beyond either extreme lies from it on average, (2,); a symmetric
    range has one extreme.
    """
    if symmetric:
        return torch.stack(
            [_mean_excess(exact.abs(), counts), torch.zeros((), dtype=torch.float64)]
        )
    return torch.stack([_mean_excess(-exact, counts), _mean_excess(exact, counts)])


def _mean_excess(values: Tensor, counts: Tensor) -> Tensor:
    """How far the greatest values, which come so often each, go beyond the last of them; those
    below 0 are taken for 0.

    >>> _mean_excess(torch.tensor([5.0, 9.0, 8.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 7.0]))
    tensor(3.5000)
    """
    order = values.argsort(descending=True)
    at = torch.searchsorted(counts[order].cumsum(0), torch.arange(1, OUTERMOST + 1).to(counts))
    outermost = values[order][at.clamp(max=len(values) - 1)].clamp(min=0)
    return (outermost[:-1] - outermost[-1]).mean()


def _error_beyond(ends: Tensor, extremes: Tensor, excess: Tensor) -> Tensor:
    """The error of new values that lie beyond ranges `ends` (2, N), (N,): of as many as were
    seen, one at either end.

    It lies exponentially far beyond the extreme, and the power p of an exponential has the mean
    gamma(p + 1) mean^p.
    """
    wider = (ends.abs() - extremes.abs()).clamp(min=0)
    beyond = torch.exp(-wider / excess.clamp(min=torch.finfo(torch.float64).tiny)[:, None])
    return math.gamma(AUTO_POWER + 1) * (excess**AUTO_POWER) @ beyond


def _error_of(ends: Tensor, exact: Tensor, counts: Tensor, spec: QuantizationSpec) -> Tensor:
    """The error of so many values `exact` under ranges `ends` (2, N), (N,)."""
    qparams = qparams_from_range(ends[0], ends[1], code_range_of(spec))
    rounded = exact.repeat(ends.shape[1], 1)
    fill(rounded, rounded, qparams.scale, qparams.zero_point, kernel_of(spec), ch_axis=0)
    return rounded.sub_(exact).abs_().pow_(AUTO_POWER) @ counts


def _clips(spec: QuantizationSpec) -> Tensor:
    """Clips to try, in bins: the centres 1536, 1552, ... of pytorch_nndct, the maximum, and 16
    per octave below them.

    Low bit widths need those: at 2 bits the best clip of Gaussian data is 1.03 sigma, a quarter
    of the maximum. Where the spec's rule for symmetric scales cuts even the maximum, the scale
    that does not is tried too.
    """
    upper = torch.arange(1536, BINS, 16, dtype=torch.float64) + 0.5
    octaves = (
        torch.arange(7 * MSE_STEPS_PER_OCTAVE, 0, -1, dtype=torch.float64)
        / MSE_STEPS_PER_OCTAVE
    )
    widest = sorted({1.0, uncut(code_range_of(spec))})
    return torch.cat(
        [upper[0] / 2**octaves, upper, BINS * torch.tensor(widest, dtype=torch.float64)]
    )


def _least_power(values: Distribution, spec: QuantizationSpec) -> Range:
    """The range times the power of two, of those in POWERS, with the least squared error; of
    equal ones the widest.

    The errors are those of the bins' centres under the scales themselves, so that what is
    compared is what can be.
    """
    code_range, kernel, errors = code_range_of(spec), kernel_of(spec), []
    factors = torch.tensor(
        POWERS if spec.scale_type in SHARED else POWERS[1:], dtype=torch.float64
    )
    qparams = qparams_from_range(
        values.low * factors[:, None], values.high * factors[:, None], code_range
    )
    exact = values.width[:, None] * CENTRES
    for scale, zero_point in zip(qparams.scale, qparams.zero_point, strict=True):
        rounded = fill(torch.empty_like(exact), exact, scale, zero_point, kernel, 0)
        errors.append(rounded.sub_(exact).square_().mul_(values.histogram).sum(1))
    best = factors[torch.stack(errors).argmin(0)]
    return values.low * best, values.high * best


def _errors(values: Distribution, codes: QuantizationSpec) -> Tensor:
    """The squared error of each row under every clip, up to a factor of the row, (R, clips)."""
    if not isinstance(values, PooledBatches):  # amax is where the bins end
        return values.histogram @ _squared_errors(codes).T
    found = []
    for counts, stretch in zip(
        values.histogram, values.width * BINS / values.amax.clamp(min=1e-300), strict=True
    ):
        occupied = counts.nonzero().squeeze(1)
        found.append(_errors_at(CENTRES[occupied] * stretch, codes) @ counts[occupied])
    return torch.stack(found)


@lru_cache(maxsize=16)
def _squared_errors(spec: QuantizationSpec) -> Tensor:
    """Return the squared error, in bins^2, of every bin's centre under every clip, (clips, 2 *
    BINS) float64.

    It depends on no data, so a histogram times this matrix gives the error of all clips at
    once.
    """
    return _errors_at(CENTRES, spec)


def _errors_at(centres: Tensor, spec: QuantizationSpec) -> Tensor:
    """The same for some centres (N,), in bins: (clips, N)."""
    scale = symmetric_step(_clips(spec), code_range_of(spec)).float()
    values = centres.repeat(len(scale), 1)
    fill(values, values, scale, torch.zeros_like(scale), kernel_of(spec), ch_axis=0)
    return (values - centres).square_()
