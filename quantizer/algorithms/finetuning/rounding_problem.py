"""Choose a layer's integer weights by least squares over sampled inputs, without gradients.

AdaRound derives a quadratic binary problem for each output channel, and relaxes it for gradient
descent. Here coordinate descent works on the quadratic form itself. It needs no learning rate
and no random start, and one matrix product per sweep instead of thousands. AdaQuant learns the
weights and scales of one layer at a time. Here each scale is chosen for the layer's output, and
weights are rounded as in AdaRound.

Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization" (arXiv
2004.10568), section 3.2; Hubara et al. 2021, "Accurate Post Training Quantization With Small
Calibration Sets", section 3.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

DAMPING = 1.0
"""Share of the inputs' mean square. Calibration photos are few and alike, and new ones have
other directions.
"""
_MAX_SWEEPS = 10
# Columns whose changes reach the others in one product
_BLOCK_COLUMNS = 128
_FINER_SCALES = tuple(1 - step / 20 for step in range(12))
"""Candidates as multiples of the observed scale: 1, 0.95, …, 0.45."""
_FINER_POWERS_OF_TWO = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class RoundingProblem:
    """States the problem to find integers c and scales s that bring inputs @ (c s)^T near to
    the targets, group by group.

    Each output channel is a row of `weight`, and independent of the others except for scales
    they share. The error is that of AdaRound before its relaxation (its equation 13). Inputs
    are those of the quantized network, and targets those of the float network. `DAMPING` times
    the distance from the float weights is added.

    Attributes:
        weight: float weights [groups, rows, depth], float32, as are all but `unit`.
        nearest: integers of round-to-nearest minus the zero point, same shape.
        inputs: [groups, samples, depth], quantized.
        targets: [groups, samples, rows], without the bias.
        scale: [units], the scales there are.
        zero_point: [units].
        unit: which of them each row has, int64 [groups, rows].
        quant_min, quant_max: the least and the greatest code.
        power_of_two: whether scales must stay powers of two.
        uncut: the scale that cuts nothing off as a multiple of `scale`, at least 1.
    """

    weight: Tensor
    nearest: Tensor
    inputs: Tensor
    targets: Tensor
    scale: Tensor
    zero_point: Tensor
    unit: Tensor
    quant_min: int
    quant_max: int
    power_of_two: bool = False
    uncut: float = 1.0

    @cached_property
    def hessian(self) -> Tensor:
        """Return H, the mean of x x^T over the samples with the damping on its diagonal:
        [groups, depth, depth].
        """
        gram = self.inputs.mT @ self.inputs / self.inputs.shape[1]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += (DAMPING * diagonal.mean(1, keepdim=True)).clamp(min=1e-12)
        return gram

    @cached_property
    def pull(self) -> Tensor:
        """Return the mean of y x^T, plus the damping's pull to the float weights: [groups,
        rows, depth].
        """
        damping = (self.inputs.square().mean((1, 2)) * DAMPING).clamp(min=1e-12)
        products = self.targets.mT @ self.inputs / self.inputs.shape[1]
        return products + damping[:, None, None] * self.weight

    def steps(self, scale: Tensor) -> Tensor:
        """Return the scale of each row, [groups, rows, 1]."""
        return scale[self.unit][..., None]

    def bounds(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two integers next to each weight, clamped to codes."""
        zero_point = self.steps(self.zero_point)
        least = self.quant_min - zero_point
        greatest = self.quant_max - zero_point
        exact = (self.weight / self.steps(scale)).clamp(least, greatest)
        return exact.floor(), exact.ceil()

    def round_to_nearest(self, scale: Tensor) -> Tensor:
        """Return the integers of round-to-nearest with other scales."""
        low, high = self.bounds(scale)
        return (self.weight / self.steps(scale)).round().clamp(low, high)

    def errors(self, integers: Tensor, scale: Tensor) -> Tensor:
        """Return the damped error of each row, up to a constant: [groups, rows]."""
        values = integers * self.steps(scale)
        return (values * (values @ self.hessian - 2 * self.pull)).sum(2)

    def per_unit(self, values: Tensor) -> Tensor:
        """Sum [groups, rows] over the rows that share a scale: [units]."""
        zeros = values.new_zeros(len(self.scale))
        return zeros.index_add(0, self.unit.flatten(), values.flatten())


def adaround(problem: RoundingProblem) -> tuple[Tensor, Tensor]:
    """Return the integers [groups, rows, depth] that coordinate descent finds from
    round-to-nearest, and the scales unchanged.
    """
    low, high = problem.bounds(problem.scale)
    low = torch.minimum(low, problem.nearest)
    high = torch.maximum(high, problem.nearest)
    integers = _descend(problem, problem.nearest, problem.scale, low=low, high=high)
    return integers, problem.scale


def adaquant(problem: RoundingProblem) -> tuple[Tensor, Tensor]:
    """Return integers [groups, rows, depth] and scales [units]; the zero points stay.

    The best of some finer scales under round-to-nearest comes first, then coordinate descent on
    the integers, then the scale that fits these integers exactly. Scales that must be powers of
    two stay at the best power.
    """
    scale = _best_scale(problem)
    low, high = problem.bounds(scale)
    nearest = problem.round_to_nearest(scale)
    integers = _descend(problem, nearest, scale, low=low, high=high)
    if problem.power_of_two:
        return integers, scale
    curvature = problem.per_unit((integers * (integers @ problem.hessian)).sum(2))
    fitted = problem.per_unit((integers * problem.pull).sum(2)) / curvature
    is_valid = (fitted > 0) & fitted.isfinite()
    return integers, torch.where(is_valid, fitted, scale)


def _descend(
    problem: RoundingProblem, integers: Tensor, scale: Tensor, *, low: Tensor, high: Tensor
) -> Tensor:
    """Give each integer in turn its best value within the bounds while the others stay, until
    a sweep changes none.

    No step makes a row's error larger, except by float32's noise.
    """
    steps = problem.steps(scale)
    hessian = problem.hessian
    integers = integers.clone()
    gradient = (integers * steps) @ hessian - problem.pull
    for _ in range(_MAX_SWEEPS):
        before = integers.clone()
        for start in range(0, integers.shape[2], _BLOCK_COLUMNS):
            block = slice(start, start + _BLOCK_COLUMNS)
            change = _descend_block(
                integers[..., block],
                gradient[..., block],
                hessian[:, block, block],
                steps,
                low=low[..., block],
                high=high[..., block],
            )
            gradient += change @ hessian[:, block]
        if torch.equal(before, integers):
            break
    return integers


def _descend_block(
    integers: Tensor,
    gradient: Tensor,
    hessian: Tensor,
    steps: Tensor,
    *,
    low: Tensor,
    high: Tensor,
) -> Tensor:
    """Round a block's columns one by one, in place. Return the change of each weight."""
    gradient = gradient.clone()
    changes = torch.zeros_like(gradient)
    for index in range(integers.shape[2]):
        column = slice(index, index + 1)
        current = integers[..., column]
        newton_step = gradient[..., column] / (hessian[:, column, column] * steps)
        best = (current - newton_step).round_()
        best = best.clamp_(low[..., column], high[..., column])
        change = (best - current) * steps
        current.copy_(best)
        changes[..., column] = change
        gradient += change * hessian[:, column]
    return changes


def _best_scale(problem: RoundingProblem) -> Tensor:
    """Return the candidate with the least error for each scale, and the observed one if none is
    better.
    """
    best = problem.scale
    least = problem.per_unit(problem.errors(problem.nearest, best))
    ratios = (*_FINER_SCALES, problem.uncut)
    if problem.power_of_two:
        ratios = _FINER_POWERS_OF_TWO
    for ratio in ratios:
        scale = problem.scale * ratio
        nearest = problem.round_to_nearest(scale)
        error = problem.per_unit(problem.errors(nearest, scale))
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best
