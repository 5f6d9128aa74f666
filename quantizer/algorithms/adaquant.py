"""Learned steps and rounding: each scale is chosen for the layer's output, then the weights are rounded as in AdaRound.

After AdaQuant (Hubara et al., "Accurate Post Training Quantization With Small Calibration Sets", 2021, section 3),
which learns weights and scales of one layer at a time; here on the quadratic form, without gradient descent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.algorithms.adaround import descend
from quantizer.algorithms.rounding_problem import RoundingProblem

FINER = tuple(1 - step / 20 for step in range(12))  # of the observed scale: 1, 0.95, …, 0.45
FINER_POWERS = (1.0, 0.5, 0.25)


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
