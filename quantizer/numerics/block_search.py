"""Searches the scales of groups, and their minima, for the least weighted squared error.

The scale of a group is first found by itself: several scales are tried, and each is fitted to
the codes that it leads to by least squares. In a format with super-blocks, the scales become
codes of few bits. Then each group tries the neighbours of its codes, and the super-block's
factors are fitted to all of its codes.

Source: the idea of fitting scales to codes, and super-blocks, are ggml's (quantize_row_q4_K_ref
and its kin).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from quantizer.numerics.formats import FloatFormat, format_named, to_levels_
from quantizer.numerics.superblocks import (
    LEAST_FACTOR,
    SUPERBLOCK,
    SUPERBLOCKS,
    SuperBlockLayout,
    rounded_factor,
)

_VALUES_AT_ONCE = 1 << 19
_VALUES_AT_ONCE_ON_A_DEVICE = 1 << 24
_REFITS = 3
"""How often the best scale of a group is fitted to its codes again."""
_ROUNDS = 2
"""How often codes of scales and factors of super-blocks are changed in turn."""
_NEIGHBOURS: tuple[int, ...] = (-1, 0, 1)
_LEAST = 1e-30
_LEAST_DETERMINANT = 1e-6
"""As a share of what it would be for columns at right angles."""
_WEIGHT_FLOOR = 1e-4
"""Added to weights, as a share of their mean: inputs that were always zero need not stay so."""

SEARCHED = ("q4_k", "q5_k", "q6_k", "iq4_nl")
"""The formats whose scales are always searched here."""


@dataclass(frozen=True)
class SearchedFormat:
    """A format that lists its levels, and the scales that it may have.

    `layout` is that of its super-blocks; None if the scale of a group is a float16.
    """

    row: FloatFormat
    layout: SuperBlockLayout | None = None
    has_signed_scale: bool = False

    @classmethod
    def of(cls, name: str) -> SearchedFormat:
        """Return one of SEARCHED."""
        row = format_named(name)
        return cls(row, SUPERBLOCKS.get(name), row.has_signed_scale)


@dataclass(frozen=True)
class _Fit:
    """The a and b of `_least_squares`, and the part of the weighted squares that they
    explain.
    """

    a: Tensor
    b: Tensor
    explained: Tensor


@dataclass(frozen=True)
class _Groups:
    """Values [groups, values] with their weights."""

    x: Tensor
    weights: Tensor
    format: SearchedFormat

    @property
    def row(self) -> FloatFormat:
        return self.format.row

    def may_have(self, scale: Tensor) -> Tensor:
        """Return whether groups may have these scales."""
        if self.format.has_signed_scale:
            return scale.isfinite() & (scale.abs() > _LEAST)
        return scale.isfinite() & (scale > _LEAST)

    def codes(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the nearest codes for scales and minima [groups, 1]."""
        return to_levels_((self.x + minimum) / scale, self.row)

    def error(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the weighted squared error of each group, [groups, 1]."""
        values = self.codes(scale, minimum).mul_(scale).sub_(minimum)
        squares = values.sub_(self.x).square_().mul_(self.weights)
        return squares.sum(1, keepdim=True)

    def fitted(self, codes: Tensor) -> _Fit:
        """Return the scales and minima with the least error for these codes, [groups, 1]."""
        offsets = torch.ones_like(codes) if self.row.has_minimum else None
        return _least_squares(_sum, self.x, self.weights, codes, offsets)


@dataclass(frozen=True)
class _Found:
    """The best scales and minima so far, and their errors, [groups, 1] each."""

    scale: Tensor
    minimum: Tensor
    error: Tensor

    def best_of(self, groups: _Groups, scale: Tensor, minimum: Tensor) -> _Found:
        """Return for each group the better one of this and of other scales and minima."""
        scale = scale.where(groups.may_have(scale), self.scale)
        error = groups.error(scale, minimum)
        is_better = error < self.error
        return _Found(
            torch.where(is_better, scale, self.scale),
            torch.where(is_better, minimum, self.minimum),
            torch.where(is_better, error, self.error),
        )


def searched_scales(
    rows: Tensor,
    importance: Tensor | None,
    searched: SearchedFormat,
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
    layout = searched.layout
    size = _VALUES_AT_ONCE if rows.is_cpu else _VALUES_AT_ONCE_ON_A_DEVICE
    height = max(1, size // SUPERBLOCK) * SUPERBLOCK // rows.shape[1]
    importances: Sequence[Tensor | None] = [None] * -(-len(rows) // height)
    if importance is not None:
        importances = torch.split(importance, height)
    scales: list[Tensor] = []
    minima: list[Tensor] = []
    for part, part_importance in zip(torch.split(rows, height), importances, strict=True):
        groups = _groups(part.float(), part_importance, searched)
        found = _search_alone(groups)
        if layout is None:
            found = _with_half_scales(groups, found)
        else:
            found = _SuperBlocks(groups, found, layout).searched()
        scales.append(found.scale.flatten())
        minima.append(found.minimum.flatten())
    return torch.cat(scales), torch.cat(minima)


def _groups(x: Tensor, importance: Tensor | None, searched: SearchedFormat) -> _Groups:
    """Return groups with weights of about 1, which keeps float32 in its range.

    The error of a value counts by the root of its square plus the mean square of its group.
    Large weights matter more to a network than the sum of squares says.

    Source: ggml, for quantizers with an importance matrix.
    """
    squares = x.square()
    weights = squares.add_(squares.mean(1, keepdim=True)).sqrt_()
    if importance is not None:
        weights *= importance / importance.mean(dtype=torch.float64).clamp(min=_LEAST)
    weights /= weights.mean(dtype=torch.float64).clamp(min=_LEAST)
    return _Groups(x, weights.add_(_WEIGHT_FLOOR), searched)


def _search_alone(groups: _Groups) -> _Found:
    """Return the best scale and minimum of each group, as if they could be any floats."""
    minimum = torch.zeros_like(groups.x[:, :1])
    # The least float16 suits groups of zeros
    scale = torch.full_like(minimum, LEAST_FACTOR)
    explained = torch.zeros_like(minimum)
    for first_scale, first_minimum in _candidates(groups):
        fit = groups.fitted(groups.codes(first_scale, first_minimum))
        is_better = groups.may_have(fit.a) & (fit.explained > explained)
        scale = torch.where(is_better, fit.a, scale)
        minimum = torch.where(is_better, fit.b, minimum)
        explained = torch.where(is_better, fit.explained, explained)
    found = _Found(scale, minimum, groups.error(scale, minimum))
    for _ in range(_REFITS):
        fit = groups.fitted(groups.codes(found.scale, found.minimum))
        found = found.best_of(groups, fit.a, fit.b)
    return found


def _candidates(groups: _Groups) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and minima to start from."""
    levels = groups.row.levels
    low = groups.x.amin(1, keepdim=True).clamp(max=0)
    high = groups.x.amax(1, keepdim=True).clamp(min=0)
    if groups.row.has_minimum:
        span = (high - low).clamp(min=_LEAST)
        for steps in (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, 4.0):
            yield span / (levels[-1] + 0.5 * steps), -low
        return
    is_positive = high > -low
    outermost = torch.where(is_positive, high, low)
    outermost = outermost.where(outermost != 0, _LEAST)
    inner = (levels[1] - levels[0]) / 2
    for steps in (0.0, -1.0, 1.0, -0.5, 0.5, -1.5, 1.5, 2.0):
        # The value of the largest magnitude at the least level, a little beyond or before it
        for level in (levels[0], levels[-1]):
            scale = outermost / (level + inner * steps)
            if not groups.format.has_signed_scale:
                scale = scale.abs()
            yield scale, torch.zeros_like(low)


def _with_half_scales(groups: _Groups, found: _Found) -> _Found:
    """Return the found scales as float16."""
    scale = rounded_factor(found.scale)
    return _Found(scale, found.minimum, found.error)


class _SuperBlocks:
    """Groups whose scales and minima are codes times factors of their super-block.

    All tensors are [groups, 1]; factors are repeated for the groups.
    """

    def __init__(self, groups: _Groups, found: _Found, layout: SuperBlockLayout) -> None:
        self.groups = groups
        self.layout = layout
        self.error = torch.full_like(found.error, torch.inf)
        outermost = layout.scales.outermost[0]
        largest = self._outermost(found.scale)
        self.factor = self._repeated(rounded_factor(largest / outermost))
        self.codes = layout.scales.nearest(found.scale / self.factor)
        self.minimum_factor = torch.zeros_like(self.factor)
        self.minimum_codes = torch.zeros_like(self.codes)
        if layout.minima is not None:
            largest = self._outermost(found.minimum)
            factor = rounded_factor(largest / layout.minima.most)
            self.minimum_factor = self._repeated(factor)
            minimum = found.minimum / self.minimum_factor
            self.minimum_codes = layout.minima.nearest(minimum)
        self.error = groups.error(self.scale, self.minimum)

    @property
    def scale(self) -> Tensor:
        """Return the scales of groups."""
        return self.codes * self.factor

    @property
    def minimum(self) -> Tensor:
        """Return the minima of groups."""
        return self.minimum_codes * self.minimum_factor

    def searched(self) -> _Found:
        """Return better scales and minima."""
        for _ in range(_ROUNDS):
            self._try_neighbours()
            self._fit_factors()
        self._try_neighbours()
        return _Found(self.scale, self.minimum, self.error)

    def _try_neighbours(self) -> None:
        """Take the best of the codes beside the present ones, for each group."""
        scales = self.codes
        minima = self.minimum_codes
        minimum_steps = _NEIGHBOURS
        if self.layout.minima is None:
            minimum_steps = (0,)
        for scale_step, minimum_step in product(_NEIGHBOURS, minimum_steps):
            if scale_step == 0 and minimum_step == 0:
                continue
            self._try_codes(scales + scale_step, minima + minimum_step)

    def _try_codes(self, codes: Tensor, minimum_codes: Tensor) -> None:
        codes = self.layout.scales.nearest(codes)
        if self.layout.minima is not None:
            minimum_codes = self.layout.minima.nearest(minimum_codes)
        error = self.groups.error(codes * self.factor, minimum_codes * self.minimum_factor)
        is_better = error < self.error
        self.codes = torch.where(is_better, codes, self.codes)
        self.minimum_codes = torch.where(is_better, minimum_codes, self.minimum_codes)
        self.error = torch.where(is_better, error, self.error)

    def _fit_factors(self) -> None:
        """Fit the factors of each super-block to all of its codes, if its error shrinks."""
        groups = self.groups
        steps = groups.codes(self.scale, self.minimum) * self.codes
        offsets = None
        if self.layout.minima is not None:
            offsets = self.minimum_codes.expand_as(steps)
        fit = _least_squares(self._summed, groups.x, groups.weights, steps, offsets)
        factor = self._repeated(rounded_factor(fit.a))
        minimum_factor = self._repeated(rounded_factor(fit.b))
        self._try_factors(factor, minimum_factor)

    def _try_factors(self, factor: Tensor, minimum_factor: Tensor) -> None:
        error = self.groups.error(self.codes * factor, self.minimum_codes * minimum_factor)
        is_better = self._repeated(self._summed(error) < self._summed(self.error))
        self.factor = torch.where(is_better, factor, self.factor)
        self.minimum_factor = torch.where(is_better, minimum_factor, self.minimum_factor)
        self.error = torch.where(is_better, error, self.error)

    def _outermost(self, numbers: Tensor) -> Tensor:
        """Return the number with the largest magnitude of each super-block, [super-blocks,
        1].
        """
        blocks = numbers.view(-1, self.layout.groups)
        return blocks.gather(1, blocks.abs().argmax(1, keepdim=True))

    def _summed(self, numbers: Tensor) -> Tensor:
        """Return the sum over each super-block, [super-blocks, 1]."""
        by_block = numbers.reshape(-1, self.layout.groups * numbers.shape[1])
        return by_block.sum(1, keepdim=True)

    def _repeated(self, numbers: Tensor) -> Tensor:
        """Return numbers of super-blocks for each of their groups."""
        return numbers.repeat_interleave(self.layout.groups, 0)


def _sum(numbers: Tensor) -> Tensor:
    """Return the sum of each row, [rows, 1]."""
    return numbers.sum(1, keepdim=True)


def _least_squares(
    summed: Callable[[Tensor], Tensor],
    x: Tensor,
    weights: Tensor,
    steps: Tensor,
    offsets: Tensor | None,
) -> _Fit:
    """Return a and b >= 0 for which a * steps - b * offsets is nearest to x.

    Where the best b is negative, it is 0.

    Args:
        summed: adds up what one a and b are for.
        x: the values.
        weights: of their squared errors.
        steps, offsets: what a and b multiply. Without offsets, b is 0.
    """
    weighted = weights * steps
    step_squares = summed(weighted * steps)
    step_products = summed(weighted * x)
    a = step_products / step_squares.clamp(min=_LEAST)
    b = torch.zeros_like(a)
    if offsets is None:
        return _Fit(a, b, a * step_products)
    mixed = summed(weighted * offsets)
    weighted = weights * offsets
    offset_squares = summed(weighted * offsets)
    offset_products = summed(weighted * x)
    most = step_squares * offset_squares
    determinant = most - mixed.square()
    is_solvable = determinant > _LEAST_DETERMINANT * most
    determinant = determinant.where(is_solvable, 1.0)
    joint_a = (step_products * offset_squares - offset_products * mixed) / determinant
    joint_b = (step_products * mixed - offset_products * step_squares) / determinant
    is_joint = is_solvable & (joint_a > 0) & (joint_b > 0)
    a = torch.where(is_joint, joint_a, a)
    b = torch.where(is_joint, joint_b, b)
    return _Fit(a, b, a * step_products - b * offset_products)
