"""Groups of values with weights: the scales and minima that fit their codes best, also where
these are codes times factors of a super-block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from quantizer.numerics.formats import format_named, to_levels_
from quantizer.numerics.superblocks import (
    LEAST_FACTOR,
    SUPERBLOCK,
    SUPERBLOCKS,
    SuperBlockLayout,
    rounded_factor,
)
from quantizer.rows import NumberFormat

LEAST = 1e-30
"""Sums below this count as 0."""
_LEAST_DETERMINANT = 1e-6
"""As a share of what it would be for columns at right angles."""

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


@dataclass(frozen=True)
class SearchedFormat:
    """A format that lists its levels, and the scales that it may have.

    `layout` is that of its super-blocks; None if the scale of a group is a float16.
    """

    row: NumberFormat
    layout: SuperBlockLayout | None = None
    has_signed_scale: bool = False

    @classmethod
    def of(cls, name: str) -> SearchedFormat:
        """Return the format of a name."""
        row = format_named(name)
        layout = SUPERBLOCKS.get(name)
        return cls(row, layout, row.has_signed_scale)


@dataclass(frozen=True)
class Fit:
    """The factors of steps and of offsets, and the weighted squares that they explain."""

    factor: Tensor
    offset: Tensor
    explained: Tensor


@dataclass(frozen=True)
class WeightedGroups:
    """Values [groups, values] with the weights of their squared errors.

    Scales, minima and errors of groups are [groups, 1].
    """

    x: Tensor
    weights: Tensor
    format: SearchedFormat

    @property
    def row(self) -> NumberFormat:
        """Return the format's row in the table of formats."""
        return self.format.row

    def may_have(self, scale: Tensor) -> Tensor:
        """Return whether groups may have these scales."""
        size = scale
        if self.format.has_signed_scale:
            size = scale.abs()
        return scale.isfinite() & (size > LEAST)

    def codes(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the nearest codes for scales and minima."""
        steps = self.x + minimum
        steps /= scale
        return to_levels_(steps, self.row)

    def error(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the weighted squared error of each group."""
        values = self.codes(scale, minimum)
        values *= scale
        values -= minimum
        values -= self.x
        values.square_()
        values *= self.weights
        return values.sum(1, keepdim=True)

    def fitted(self, codes: Tensor) -> Fit:
        """Return the scales and minima with the least error for these codes."""
        offsets = None
        if self.row.has_minimum:
            offsets = torch.ones_like(codes)
        return self.least_squares(codes, offsets, _sum_of_row)

    def least_squares(
        self, steps: Tensor, offsets: Tensor | None, summed: Callable[[Tensor], Tensor]
    ) -> Fit:
        """Return the factors for which factor * steps - offset * offsets is nearest to the
        values. Where the best offset is negative, it is 0.

        Args:
            steps: what the factor multiplies, in the shape of the values.
            offsets: what the offset multiplies; without them, it is 0.
            summed: adds up the values that have one factor.
        """
        x = self.x
        weighted = self.weights * steps
        step_squares = summed(weighted * steps)
        step_products = summed(weighted * x)
        factor = step_products / step_squares.clamp(min=LEAST)
        offset = torch.zeros_like(factor)
        if offsets is None:
            return Fit(factor, offset, factor * step_products)
        mixed = summed(weighted * offsets)
        weighted = self.weights * offsets
        offset_squares = summed(weighted * offsets)
        offset_products = summed(weighted * x)
        most = step_squares * offset_squares
        determinant = most - mixed.square()
        is_solvable = determinant > _LEAST_DETERMINANT * most
        determinant = determinant.where(is_solvable, 1.0)
        joint_factor = step_products * offset_squares
        joint_factor -= offset_products * mixed
        joint_factor /= determinant
        joint_offset = step_products * mixed
        joint_offset -= offset_products * step_squares
        joint_offset /= determinant
        is_joint = is_solvable & (joint_factor > 0) & (joint_offset > 0)
        factor = joint_factor.where(is_joint, factor)
        offset = joint_offset.where(is_joint, offset)
        explained = factor * step_products
        explained -= offset * offset_products
        return Fit(factor, offset, explained)


@dataclass(frozen=True)
class Scales:
    """The best scales and minima of groups so far, and their errors."""

    scale: Tensor
    minimum: Tensor
    error: Tensor

    def best_of(self, groups: WeightedGroups, fit: Fit) -> Scales:
        """Return for each group the better one of these and of fitted ones."""
        scale = fit.factor.where(groups.may_have(fit.factor), self.scale)
        minimum = fit.offset
        error = groups.error(scale, minimum)
        is_better = error < self.error
        return Scales(
            scale.where(is_better, self.scale),
            minimum.where(is_better, self.minimum),
            error.where(is_better, self.error),
        )


def _sum_of_row(numbers: Tensor) -> Tensor:
    return numbers.sum(1, keepdim=True)


_ROUNDS = 2
"""How often codes and factors are changed in turn."""
_NEIGHBOURS: tuple[int, ...] = (-1, 0, 1)


class SuperBlockSearch:
    """Groups with the best codes and factors so far.

    All tensors are [groups, 1]. All groups of a super-block have its factor.

    Args:
        groups: whole super-blocks, one after the other.
        start: scales and minima of the groups, as if they could be any floats.
        layout: of the super-blocks.
    """

    def __init__(self, groups: WeightedGroups, start: Scales, layout: SuperBlockLayout) -> None:
        self.groups = groups
        self.layout = layout
        outermost = layout.scales.outermost[0]
        largest = self._outermost(start.scale)
        self.factor = self._repeated(rounded_factor(largest / outermost))
        self.codes = layout.scales.nearest(start.scale / self.factor)
        self.minimum_factor = torch.zeros_like(self.factor)
        self.minimum_codes = torch.zeros_like(self.codes)
        if layout.minima is not None:
            largest = self._outermost(start.minimum)
            factor = rounded_factor(largest / layout.minima.most)
            self.minimum_factor = self._repeated(factor)
            codes = start.minimum / self.minimum_factor
            self.minimum_codes = layout.minima.nearest(codes)
        self.error = groups.error(self.scale, self.minimum)

    @property
    def scale(self) -> Tensor:
        """Return the scales of groups."""
        return self.codes * self.factor

    @property
    def minimum(self) -> Tensor:
        """Return the minima of groups."""
        return self.minimum_codes * self.minimum_factor

    def searched(self) -> Scales:
        """Search, and return the scales and minima with the least error, and the error."""
        for _ in range(_ROUNDS):
            self._try_neighbours()
            self._fit_factors()
        self._try_neighbours()
        return Scales(self.scale, self.minimum, self.error)

    def _try_neighbours(self) -> None:
        """Take the best of the codes next to the present ones, for each group."""
        codes = self.codes
        minimum_codes = self.minimum_codes
        minimum_steps = _NEIGHBOURS
        if self.layout.minima is None:
            minimum_steps = (0,)
        for step, minimum_step in product(_NEIGHBOURS, minimum_steps):
            if step or minimum_step:
                self._try_codes(codes + step, minimum_codes + minimum_step)

    def _try_codes(self, codes: Tensor, minimum_codes: Tensor) -> None:
        """Take these codes for the groups whose error shrinks."""
        codes = self.layout.scales.nearest(codes)
        if self.layout.minima is not None:
            minimum_codes = self.layout.minima.nearest(minimum_codes)
        scale = codes * self.factor
        minimum = minimum_codes * self.minimum_factor
        error = self.groups.error(scale, minimum)
        is_better = error < self.error
        self.codes = codes.where(is_better, self.codes)
        self.minimum_codes = minimum_codes.where(is_better, self.minimum_codes)
        self.error = error.where(is_better, self.error)

    def _fit_factors(self) -> None:
        """Take the factors that fit all codes of a super-block best, if its error shrinks.

        With fixed codes, values are linear in the factors, so that least squares fits them.
        """
        steps = self.groups.codes(self.scale, self.minimum)
        steps *= self.codes
        offsets = None
        if self.layout.minima is not None:
            offsets = self.minimum_codes.expand_as(steps)
        fit = self.groups.least_squares(steps, offsets, self._summed)
        factor = self._repeated(rounded_factor(fit.factor))
        minimum_factor = self._repeated(rounded_factor(fit.offset))
        scale = self.codes * factor
        minimum = self.minimum_codes * minimum_factor
        error = self.groups.error(scale, minimum)
        is_better = self._summed(error) < self._summed(self.error)
        is_better = self._repeated(is_better)
        self.factor = factor.where(is_better, self.factor)
        self.minimum_factor = minimum_factor.where(is_better, self.minimum_factor)
        self.error = error.where(is_better, self.error)

    def _outermost(self, numbers: Tensor) -> Tensor:
        """Return the number with the largest magnitude of each super-block, [super-blocks,
        1].
        """
        by_block = numbers.view(-1, self.layout.groups)
        index = by_block.abs().argmax(1, keepdim=True)
        return by_block.gather(1, index)

    def _summed(self, numbers: Tensor) -> Tensor:
        """Return the sum over each super-block, [super-blocks, 1]."""
        values = self.layout.groups * numbers.shape[1]
        by_block = numbers.reshape(-1, values)
        return by_block.sum(1, keepdim=True)

    def _repeated(self, numbers: Tensor) -> Tensor:
        """Return numbers of super-blocks, repeated for each of their groups."""
        return numbers.repeat_interleave(self.layout.groups, 0)


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
