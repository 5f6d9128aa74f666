"""Qronos: each column is rounded for the float network's outputs, and the columns left are fitted to them anew.

Zhang et al., "Qronos: Correcting the Past by Shaping the Future... in Post-Training Quantization", 2025 (arXiv
2505.11695).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Task
from quantizer.algorithms.gptq_target import GptqTarget, Hessian, Products
from quantizer.algorithms.sequential_rounding import in_order
from quantizer.config.algorithms import QronosConfig

ITERATIONS = 30  # of the power method


class FittedOutputs(GptqTarget):
    """The weight that fits the float network's outputs best on these inputs."""

    needs_float = True
    tokens_per_input = 4

    def __init__(self, settings: QronosConfig) -> None:
        super().__init__(settings)
        self.alpha = settings.alpha

    def damping(self, gram: Tensor) -> float:
        """A share of the largest eigenvalue."""
        vector = gram.diagonal() + gram.diagonal().mean()
        for _ in range(ITERATIONS):
            vector = gram @ (vector / vector.norm().clamp(min=1e-30))
        return self.alpha * float(vector.norm())

    def target(self, weight: Tensor, hessian: Hessian, products: Products) -> tuple[Tensor, Tensor | None]:
        """W + W dXX H^-1, dXX = sum of (f - x) x^T; but the first column is rounded as if the others stayed.

        After the first, fitting the columns that are left to what those before have become is what GPTQ does to this
        weight.
        """
        assert products.drift is not None
        m, d = hessian.factor.M, hessian.factor.D
        missing = hessian.permuted(products.drift).T @ weight
        fitted = torch.linalg.solve_triangular(m, missing, upper=True, unitriangular=True) / d[:, None]
        fitted = torch.linalg.solve_triangular(m.T, fitted, upper=False, unitriangular=True)
        largest = products.gram[hessian.order[0], hessian.order[0]] + hessian.damping[0]
        return weight + fitted, weight[0] + missing[0] / largest


def qronos(task: Task, settings: QronosConfig, found: Adjustment) -> Adjustment:
    """As `gptq`, with the float network run beside the rounded one; errors are those to the weights it aims at."""
    return in_order(task, found, FittedOutputs(settings))
