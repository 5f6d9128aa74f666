"""The choice of a layer's integer weights as least squares over sampled inputs, and its
solvers, without gradients.

AdaRound derives a quadratic binary problem for each output channel and relaxes it for gradient
descent. Here coordinate descent works on the quadratic form itself: no learning rate, no random
start, and a matrix product per sweep instead of thousands. AdaQuant learns weights and scales
of one layer at a time; here each scale is chosen for the layer's output, and weights are
rounded as in AdaRound.

Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020,
section 3.2; Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets",
2021, section 3.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Of the inputs' mean square: calibration photos are few and alike, new ones lie in other
# directions
DAMPING = 1.0
SWEEPS = 10
BLOCK = 128  # columns whose changes reach the others in one product
FINER = tuple(1 - step / 20 for step in range(12))  # of the observed scale: 1, 0.95, …, 0.45
FINER_POWERS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class RoundingProblem:
    """Find integers c in [low, high] and scales s that bring inputs @ (c s)^T near to the
    targets, group by group.

    Each output channel is a row of `weight` and independent of the others, apart from scales
    they share. The error is that of AdaRound before its relaxation (its equation 13), with
    inputs as the quantized network sees them and targets as the float network makes them, plus
    `DAMPING` times the distance from the float weights.

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
        """Mean of x x^T over the samples, and the damping on its diagonal: [groups, depth,
        depth].
        """
        gram = self.inputs.mT @ self.inputs / self.inputs.shape[1]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += (DAMPING * diagonal.mean(1, keepdim=True)).clamp(min=1e-12)
        return gram

    @cached_property
    def pull(self) -> Tensor:
        """Mean of y x^T, and the damping's pull to the float weights: [groups, rows, depth]."""
        gram = (self.inputs.square().mean((1, 2)) * DAMPING).clamp(min=1e-12)
        return (
            self.targets.mT @ self.inputs / self.inputs.shape[1]
            + gram[:, None, None] * self.weight
        )

    def steps(self, scale: Tensor) -> Tensor:
        """The scale of each row: [groups, rows, 1]."""
        return scale[self.unit][..., None]

    def bounds(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The two integers next to each weight, as far as they are codes."""
        zero_point = self.steps(self.zero_point)
        exact = (self.weight / self.steps(scale)).clamp(
            self.quant_min - zero_point, self.quant_max - zero_point
        )
        return exact.floor(), exact.ceil()

    def errors(self, integers: Tensor, scale: Tensor) -> Tensor:
        """The damped error of each row, up to a constant: [groups, rows]."""
        values = integers * self.steps(scale)
        return (values * (values @ self.hessian - 2 * self.pull)).sum(2)

    def per_unit(self, values: Tensor) -> Tensor:
        """Sums of [groups, rows] over the rows that share a scale: [units]."""
        return values.new_zeros(len(self.scale)).index_add(
            0, self.unit.flatten(), values.flatten()
        )


def adaround(problem: RoundingProblem) -> tuple[Tensor, Tensor]:
    """Integers [groups, rows, depth] that coordinate descent finds from round-to-nearest, and
    the scales unchanged.
    """
    low, high = problem.bounds(problem.scale)
    start = problem.nearest
    bounds = torch.minimum(low, start), torch.maximum(high, start)
    return descend(problem, start, problem.scale, bounds), problem.scale


def descend(
    problem: RoundingProblem, integers: Tensor, scale: Tensor, bounds: tuple[Tensor, Tensor]
) -> Tensor:
    """Give each integer in turn its best value within bounds while the others stay, until no
    sweep changes any.

    No step makes a row's error larger, but for float32's noise.
    """
    steps, hessian = problem.steps(scale), problem.hessian
    integers = integers.clone()
    gradient = (integers * steps) @ hessian - problem.pull
    for _ in range(SWEEPS):
        before = integers.clone()
        for start in range(0, integers.shape[2], BLOCK):
            here = slice(start, start + BLOCK)
            within = (bounds[0][..., here], bounds[1][..., here])
            moved = _descend_block(
                integers[..., here], gradient[..., here], hessian[:, here, here], steps, within
            )
            gradient += moved @ hessian[:, here]
        if torch.equal(before, integers):
            break
    return integers


def _descend_block(
    integers: Tensor,
    gradient: Tensor,
    hessian: Tensor,
    steps: Tensor,
    bounds: tuple[Tensor, Tensor],
) -> Tensor:
    """Round a block's columns one by one, in place; returns how far each value moved."""
    gradient, moved = gradient.clone(), torch.zeros_like(gradient)
    for column in range(integers.shape[2]):
        here = slice(column, column + 1)
        current = integers[..., here]
        best = current - gradient[..., here] / (hessian[:, here, here] * steps)
        best = best.round_().clamp_(bounds[0][..., here], bounds[1][..., here])
        change = (best - current) * steps
        current.copy_(best)
        moved[..., here] = change
        gradient += change * hessian[:, here]
    return moved


def adaquant(problem: RoundingProblem) -> tuple[Tensor, Tensor]:
    """Integers [groups, rows, depth] and scales [units], the zero points unchanged.

    The best of some finer scales under round-to-nearest, then coordinate descent on the
    integers, then the scale that fits these integers exactly; scales that must be powers of two
    stay at the best power.
    """
    scale = _search(problem)
    low, high = problem.bounds(scale)
    integers = descend(problem, _nearest(problem, scale), scale, (low, high))
    if problem.power_of_two:
        return integers, scale
    curvature = problem.per_unit((integers * (integers @ problem.hessian)).sum(2))
    best = problem.per_unit((integers * problem.pull).sum(2)) / curvature
    return integers, torch.where((best > 0) & best.isfinite(), best, scale)


def _nearest(problem: RoundingProblem, scale: Tensor) -> Tensor:
    low, high = problem.bounds(scale)
    return (problem.weight / problem.steps(scale)).round().clamp(low, high)


def _search(problem: RoundingProblem) -> Tensor:
    """The candidate with the least error, for each scale; the observed one where none is
    better.
    """
    best = problem.scale
    least = problem.per_unit(problem.errors(problem.nearest, best))
    for ratio in FINER_POWERS if problem.power_of_two else (*FINER, problem.uncut):
        scale = problem.scale * ratio
        error = problem.per_unit(problem.errors(_nearest(problem, scale), scale))
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
