"""What GPTQ and its kin aim at, as far as they differ. Rounds nothing.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022; Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
Calibration", 2025 (arXiv 2504.02692); Zhang et al., "Qronos: Correcting the Past by Shaping the
Future... in Post-Training Quantization", 2025 (arXiv 2505.11695).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.algorithms.gptq.rows import Factor, factored
from quantizer.algorithms.output_error import leading
from quantizer.config.algorithms import ColumnRounding, GPTAQConfig, QronosConfig

ITERATIONS = 30  # of the power method


@dataclass(frozen=True)
class Products:
    """Sums over all tokens x of one group of channels, [depth, depth].

    `gram` is that of x x^T; `drift` that of (f - x) x^T, where f is the same token in the float
    network, if known.
    """

    gram: Tensor
    drift: Tensor | None = None


@dataclass(frozen=True)
class Hessian:
    """A Gram matrix made ready: columns in the `order` in which they are rounded, None for that
    of the weight, `damping` [depth] added to their diagonal, in `factor`s. `raised` is the
    damping as a share of the mean diagonal if it had to be more than asked.
    """

    order: Tensor | None
    damping: Tensor
    factor: Factor
    raised: float | None

    @property
    def first(self) -> int:
        """The column that is rounded first."""
        return 0 if self.order is None else int(self.order[0])

    def placed(self, columns: Tensor) -> Tensor:
        """Columns [depth, …] in this order, each a run of memory."""
        return (
            columns.contiguous() if self.order is None else columns.index_select(0, self.order)
        )

    def back(self, columns: Tensor) -> Tensor:
        """Such columns as the weight has them."""
        return columns if self.order is None else columns.index_select(0, self.order.argsort())

    def permuted(self, matrix: Tensor) -> Tensor:
        """A matrix [depth, depth] with its rows and columns in this order."""
        return matrix if self.order is None else _permuted(matrix, self.order)


@dataclass(frozen=True)
class GptqTarget:
    """GPTQ's: the outputs that the float weight gives for the inputs of the network as it is
    rounded so far.
    """

    settings: ColumnRounding
    needs_float = False
    """Whether it looks at the inputs of the float network as well."""
    tokens_per_input = 0
    """How many tokens there should be for each input channel; on fewer what it finds may not
    hold for other data.
    """

    def damping(self, gram: Tensor) -> float:
        """What is added to the diagonal at first, in units of `gram`."""
        return self.settings.damp_percent * _mean_diagonal(gram)

    def target(
        self, weight: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """The weight to come near to [depth, rows] instead of `weight`, and what to round for
        its first column.
        """
        return weight, None

    def hessian(self, gram: Tensor, *, by_size: bool) -> Hessian | None:
        """The matrix [depth, depth] made ready, with the damping ten times as large until it is
        positive definite.

        With `by_size`, columns with large inputs come first. None if not even the whole mean
        diagonal as damping helps.
        """
        diagonal = gram.diagonal()
        order = diagonal.argsort(descending=True, stable=True) if by_size else None
        mean, asked = _mean_diagonal(gram), self.damping(gram)
        damp = asked
        while True:
            # A column of zeros stays on its own
            damping = torch.where(diagonal == 0, mean, damp)
            damping = damping if order is None else damping[order]
            damped = gram.clone() if order is None else _permuted(gram, order)
            damped.diagonal().add_(damping)
            factor = factored(damped)
            if factor is not None:
                return Hessian(order, damping, factor, damp / mean if damp > asked else None)
            if damp >= mean:
                return None
            damp = min(mean, max(10 * damp, 1e-4 * mean))


class GptaqTarget(GptqTarget):
    """GPTAQ's: the outputs of the float network, as far as columns that are rounded later can
    make up for other inputs.
    """

    settings: GPTAQConfig
    needs_float = True

    def target(
        self, weight: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """W (I + alpha P), where row i of P is what the columns after i make up for the error
        of input i.

        P = triu(dXX U^T, 1) U with U^T U = H^-1 and dXX = sum of (f - x) x^T (the paper's
        parallel form). W is the float weight for all columns, so that the solver is that of
        GPTQ; the authors' code, which also has alpha, takes a column as the errors before it
        have left it, and that makes no difference that could be measured.
        """
        assert products.drift is not None
        m, d = hessian.factor.M, hessian.factor.D
        drift = hessian.permuted(products.drift)
        along = torch.linalg.solve_triangular(m, drift.T, upper=True, unitriangular=True).T
        later = torch.linalg.solve_triangular(
            m, along.triu(1) / d, upper=True, left=False, unitriangular=True
        )
        return torch.addmm(weight, later.T, weight, alpha=self.settings.alpha), None


class QronosTarget(GptqTarget):
    """Qronos': the outputs of the float network, by the weight that fits them best on the
    inputs of this one.
    """

    settings: QronosConfig
    needs_float = True
    tokens_per_input = 4

    def damping(self, gram: Tensor) -> float:
        """A share of the largest eigenvalue."""
        return self.settings.alpha * float(leading(gram, ITERATIONS).norm())

    def target(
        self, weight: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """W + W dXX H^-1, dXX = sum of (f - x) x^T; but the first column is rounded as if the
        others stayed.

        After the first, fitting the columns that are left to what those before have become is
        what GPTQ does to this weight.
        """
        assert products.drift is not None
        m, d = hessian.factor.M, hessian.factor.D
        missing = hessian.permuted(products.drift).T @ weight
        fitted = (
            torch.linalg.solve_triangular(m, missing, upper=True, unitriangular=True)
            / d[:, None]
        )
        fitted = torch.linalg.solve_triangular(m.T, fitted, upper=False, unitriangular=True)
        largest = products.gram[hessian.first, hessian.first] + hessian.damping[0]
        return weight + fitted, weight[0] + missing[0] / largest


def _permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """By `index_select`, which takes a third of the time of an index."""
    return matrix.index_select(0, order).index_select(1, order)


def _mean_diagonal(gram: Tensor) -> float:
    """Over the columns that were not always zero; 1 if there are none."""
    live = gram.diagonal()[gram.diagonal() != 0]
    return float(live.mean()) if len(live) else 1.0
