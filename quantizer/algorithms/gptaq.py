"""GPTAQ: GPTQ that aims at what the float network computes, not at what the float weight makes of rounded inputs.

Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025 (arXiv 2504.02692).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Task
from quantizer.algorithms.gptq_target import GptqTarget, Hessian, Products
from quantizer.algorithms.sequential_rounding import in_order
from quantizer.config.algorithms import GPTAQConfig


class FloatOutputs(GptqTarget):
    """The outputs of the float network, as far as columns that are rounded later can make up for other inputs."""

    needs_float = True

    def __init__(self, settings: GPTAQConfig) -> None:
        super().__init__(settings)
        self.alpha = settings.alpha

    def target(self, weight: Tensor, hessian: Hessian, products: Products) -> tuple[Tensor, Tensor | None]:
        """W (I + alpha P), where row i of P is what the columns after i make up for the error of input i.

        P = triu(dXX U^T, 1) U with U^T U = H^-1 and dXX = sum of (f - x) x^T (the paper's parallel form). W is the
        float weight for all columns, so that the solver is that of GPTQ; the authors' code, which also has alpha, takes
        a column as the errors before it have left it, and that makes no difference that could be measured.
        """
        assert products.drift is not None
        m, d = hessian.factor.M, hessian.factor.D
        drift = hessian.permuted(products.drift)
        along = torch.linalg.solve_triangular(m, drift.T, upper=True, unitriangular=True).T
        later = torch.linalg.solve_triangular(m, along.triu(1) / d, upper=True, left=False, unitriangular=True)
        return torch.addmm(weight, later.T, weight, alpha=self.alpha), None


def gptaq(task: Task, settings: GPTAQConfig, found: Adjustment) -> Adjustment:
    """As `gptq`, with the float network run beside the rounded one; errors are those to the weights it aims at."""
    return in_order(task, found, FloatOutputs(settings))
