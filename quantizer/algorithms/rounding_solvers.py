"""Solvers of the rounding problem, without gradients: each gives integers without zero point, and scales.

AdaRound (Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020) derives a quadratic
binary problem for each output channel (section 3.2) and relaxes it for gradient descent. Here coordinate descent works
on the quadratic form itself: no learning rate, no random start, and a matrix product per sweep instead of thousands.
AdaQuant (Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets", 2021, section 3) learns
weights and scales of one layer at a time; here each scale is chosen for the layer's output, and weights are rounded as
in AdaRound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.algorithms.rounding_problem import RoundingProblem

SWEEPS = 10
BLOCK = 128  # columns whose changes reach the others in one product
FINER = tuple(1 - step / 20 for step in range(12))  # of the observed scale: 1, 0.95, …, 0.45
FINER_POWERS = (1.0, 0.5, 0.25)


def adaround(problem: RoundingProblem) -> tuple[Tensor, Tensor]:
    """Integers [groups, rows, depth] that coordinate descent finds from round-to-nearest, and the scales unchanged."""
    low, high = problem.bounds(problem.scale)
    start = problem.nearest
    return descend(
        problem, start, problem.scale, (torch.minimum(low, start), torch.maximum(high, start))
    ), problem.scale


def descend(problem: RoundingProblem, integers: Tensor, scale: Tensor, bounds: tuple[Tensor, Tensor]) -> Tensor:
    """Give each integer in turn its best value within bounds while the others stay, until no sweep changes any.

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
            moved = _descend_block(integers[..., here], gradient[..., here], hessian[:, here, here], steps, within)
            gradient += moved @ hessian[:, here]
        if torch.equal(before, integers):
            break
    return integers


def _descend_block(
    integers: Tensor, gradient: Tensor, hessian: Tensor, steps: Tensor, bounds: tuple[Tensor, Tensor]
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

    The best of some finer scales under round-to-nearest, then coordinate descent on the integers, then the scale that
    fits these integers exactly; scales that must be powers of two stay at the best power.
    """
    scale = _search(problem)
    low, high = problem.bounds(scale)
    integers = descend(problem, _nearest(problem, scale), scale, (low, high))
    return integers, scale if problem.power_of_two else _fitted(problem, integers, scale)


def _nearest(problem: RoundingProblem, scale: Tensor) -> Tensor:
    low, high = problem.bounds(scale)
    return (problem.weight / problem.steps(scale)).round().clamp(low, high)


def _search(problem: RoundingProblem) -> Tensor:
    """The candidate with the least error, for each scale; the observed one where none is better."""
    best = problem.scale
    least = problem.per_unit(problem.errors(problem.nearest, best))
    for ratio in FINER_POWERS if problem.power_of_two else FINER:
        scale = problem.scale * ratio
        error = problem.per_unit(problem.errors(_nearest(problem, scale), scale))
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _fitted(problem: RoundingProblem, integers: Tensor, scale: Tensor) -> Tensor:
    """The scales that minimize the error of given integers, in closed form; those that cannot be stay."""
    curvature = problem.per_unit((integers * (integers @ problem.hessian)).sum(2))
    best = problem.per_unit((integers * problem.pull).sum(2)) / curvature
    return torch.where((best > 0) & best.isfinite(), best, scale)
