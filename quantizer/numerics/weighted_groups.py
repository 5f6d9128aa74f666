"""Groups of values with weights, and the scales and minima that fit their codes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.formats import format_named, to_levels_
from quantizer.numerics.superblocks import SUPERBLOCKS, SuperBlockLayout
from quantizer.rows import NumberFormat

LEAST = 1e-30
"""Sums below this count as 0."""
_LEAST_DETERMINANT = 1e-6
"""As a share of what it would be for columns at right angles."""


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
