"""Searches the scales of groups, and their minima, for the least weighted squared error.

The scale of a group is first found by itself: several scales are tried, and each is fitted to
the codes that it leads to by least squares. In formats with super-blocks, `group_search`
turns scales into codes of few bits.

Source: the idea of fitting scales to codes, and super-blocks, are ggml's (quantize_row_q4_K_ref
and its kin).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quantizer.numerics.group_search import (
    LEAST,
    Scales,
    SearchedFormat,
    SuperBlockSearch,
    WeightedGroups,
)
from quantizer.numerics.superblocks import LEAST_FACTOR, SUPERBLOCK, rounded_factor

_BLOCKS_AT_ONCE = 1 << 11
_BLOCKS_AT_ONCE_ON_A_DEVICE = 1 << 16
_REFITS = 3
"""How often the best scale of a group is fitted to its codes again."""
_WEIGHT_FLOOR = 1e-4
"""Added to weights, as a share of their mean: inputs that were always zero need not stay so."""
_SPAN_STEPS = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, 4.0)
"""By how many half steps the outermost values are beyond the largest level, to start from."""
_LEVEL_STEPS = (0.0, -1.0, 1.0, -0.5, 0.5, -1.5, 1.5, 2.0)
"""By how many half distances of the two least levels the outermost value is beyond a level."""


def searched_scales(
    rows: Tensor, importance: Tensor | None, searched: SearchedFormat
) -> tuple[Tensor, Tensor]:
    """Return the scales of groups and their minima, float32 [groups] each.

    Minima are 0 for formats that have none. Scales of formats with super-blocks are those that
    super-blocks store. Others are float16.

    Args:
        rows: values [groups, values], a floating-point matrix. With super-blocks, their groups
            follow each other.
        importance: of the values' squared errors, at least 0, in the shape of `rows`. None
            counts all inputs alike.
        searched: their format.
    """
    blocks = _BLOCKS_AT_ONCE if rows.is_cpu else _BLOCKS_AT_ONCE_ON_A_DEVICE
    height = blocks * SUPERBLOCK // rows.shape[1]
    parts = torch.split(rows, height)
    importances: Sequence[Tensor | None] = [None] * len(parts)
    if importance is not None:
        importances = torch.split(importance, height)
    scales: list[Tensor] = []
    minima: list[Tensor] = []
    for part, part_importance in zip(parts, importances, strict=True):
        groups = _weighted(part.float(), part_importance, searched)
        best = _search_alone(groups)
        scale = rounded_factor(best.scale)
        if searched.layout is not None:
            best = SuperBlockSearch(groups, best, searched.layout).searched()
            scale = best.scale
        scales.append(scale.flatten())
        minima.append(best.minimum.flatten())
    return torch.cat(scales), torch.cat(minima)


def _weighted(x: Tensor, importance: Tensor | None, searched: SearchedFormat) -> WeightedGroups:
    """Return groups with weights of about 1, which keeps float32 in its range.

    The error of a value counts by the root of its square plus the mean square of its group.
    Large weights matter more to a network than the sum of squares says.

    Source: ggml, for quantizers with an importance matrix.
    """
    weights = x.square()
    weights += weights.mean(1, keepdim=True)
    weights.sqrt_()
    if importance is not None:
        weights *= importance / _mean(importance)
    weights /= _mean(weights)
    weights += _WEIGHT_FLOOR
    return WeightedGroups(x, weights, searched)


def _mean(weights: Tensor) -> Tensor:
    mean = weights.mean(dtype=torch.float64)
    return mean.clamp(min=LEAST)


def _search_alone(groups: WeightedGroups) -> Scales:
    """Return the best scale and minimum of each group, as if they could be any floats."""
    minimum = torch.zeros_like(groups.x[:, :1])
    # The least float16 suits groups of zeros
    scale = torch.full_like(minimum, LEAST_FACTOR)
    explained = torch.zeros_like(minimum)
    for first_scale, first_minimum in _candidates(groups):
        codes = groups.codes(first_scale, first_minimum)
        fit = groups.fitted(codes)
        is_better = groups.may_have(fit.factor)
        is_better &= fit.explained > explained
        scale = fit.factor.where(is_better, scale)
        minimum = fit.offset.where(is_better, minimum)
        explained = fit.explained.where(is_better, explained)
    error = groups.error(scale, minimum)
    best = Scales(scale, minimum, error)
    for _ in range(_REFITS):
        codes = groups.codes(best.scale, best.minimum)
        fit = groups.fitted(codes)
        best = best.best_of(groups, fit)
    return best


def _candidates(groups: WeightedGroups) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and minima to start from."""
    levels = groups.row.levels
    low = groups.x.amin(1, keepdim=True).clamp(max=0)
    high = groups.x.amax(1, keepdim=True).clamp(min=0)
    if groups.row.has_minimum:
        span = (high - low).clamp(min=LEAST)
        for steps in _SPAN_STEPS:
            yield span / (levels[-1] + 0.5 * steps), -low
        return
    zero = torch.zeros_like(low)
    is_positive = high > -low
    outermost = torch.where(is_positive, high, low)
    outermost = outermost.where(outermost != 0, LEAST)
    half = (levels[1] - levels[0]) / 2
    for steps in _LEVEL_STEPS:
        for level in (levels[0], levels[-1]):
            scale = outermost / (level + half * steps)
            if not groups.format.has_signed_scale:
                scale = scale.abs()
            yield scale, zero
