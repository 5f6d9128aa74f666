"""Learned rounding: each weight goes up or down, whichever serves the layer's output best. Scales stay as they are.

AdaRound (Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020) derives a quadratic
binary problem for each output channel (section 3.2) and relaxes it for gradient descent. Here coordinate descent works
on the quadratic form itself: no learning rate, no random start, and a matrix product per sweep instead of thousands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.algorithms.rounding_problem import RoundingProblem

SWEEPS = 10
BLOCK = 128  # columns whose changes reach the others in one product


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
