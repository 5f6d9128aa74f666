"""The outputs that GPTQ, GPTAQ and Qronos try to match: their only difference. Rounds nothing.

GPTQ matches the outputs that the float weight gives on the inputs of the quantized network.
GPTAQ and Qronos match the outputs of the float network. Each becomes a target weight, which
`rows.round_columns` then rounds.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (arXiv 2210.17323); Li et al. 2025, "GPTAQ: Efficient Finetuning-Free
Quantization for Asymmetric Calibration" (arXiv 2504.02692); Zhang et al. 2025, "Qronos:
Correcting the Past by Shaping the Future... in Post-Training Quantization" (arXiv 2505.11695).
"""

# ruff: noqa: N803, N806 - the papers' letters
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.algorithms.gptq.rows import Factor, factorize
from quantizer.algorithms.gptq.settings import ColumnRounding, GPTAQConfig, QronosConfig
from quantizer.layerwise.output_error import leading

POWER_ITERATIONS = 30


@dataclass(frozen=True)
class Products:
    """Holds sums over all tokens of one group of channels, [depth, depth].

    Attributes:
        gram: the sum of x x^T.
        drift: the sum of (f - x) x^T, where f is the same token in the float network; None if
            that is not known.
    """

    gram: Tensor
    drift: Tensor | None = None


@dataclass(frozen=True)
class Hessian:
    """Holds H of the paper: a Gram matrix, permuted, damped and factored.

    Attributes:
        order: the columns in the order in which they are rounded, int64 [depth].
        damping: what was added to the diagonal, in that order [depth].
        factor: of the damped matrix, in that order.
        raised: the damping as a share of the mean diagonal, if it had to be larger than the
            settings ask for.
    """

    order: Tensor
    damping: Tensor
    factor: Factor
    raised: float | None

    def permuted(self, columns: Tensor) -> Tensor:
        """Return columns [depth, …] in the order of rounding."""
        # From a transposed view, values would be gathered one by one: three times as long
        return columns.contiguous().index_select(0, self.order)

    def restored(self, columns: Tensor) -> Tensor:
        """Return permuted columns in the order of the weight."""
        return columns.index_select(0, self.order.argsort())


@dataclass(frozen=True)
class GptqTarget:
    """Targets, for GPTQ, the outputs of the float weight on the quantized network's inputs."""

    settings: ColumnRounding
    needs_float = False
    """Whether the inputs of the float network are needed as well."""
    tokens_per_input = 0
    """Tokens that there should be for each input channel; with fewer, the result may not hold
    for other data.
    """

    def damping(self, gram: Tensor) -> float:
        """Return what is added to the diagonal at first, in units of `gram`."""
        return self.settings.damp_percent * _mean_diagonal(gram)

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight [depth, rows] to approximate instead of W, and what to round for
        its first column, if not that weight.
        """
        return W, None

    def hessian(self, gram: Tensor, *, by_size: bool) -> Hessian | None:
        """Return the Gram matrix [depth, depth] permuted, damped and factored.

        The damping grows tenfold until the matrix is positive definite.

        Args:
            gram: of one group of channels.
            by_size: round columns with large inputs first (`desc_act`).

        Returns:
            None if the whole mean diagonal as damping is not enough.
        """
        diagonal = gram.diagonal()
        if by_size:
            order = diagonal.argsort(descending=True, stable=True)
        else:
            order = torch.arange(len(gram), device=gram.device)
        mean = _mean_diagonal(gram)
        least = self.damping(gram)
        damp = least
        while True:
            # A column of zeros gets the mean, so that it stays on its own
            damping = torch.where(diagonal == 0, mean, damp)[order]
            H = _permuted_matrix(gram, order)
            H.diagonal().add_(damping)
            factor = factorize(H)
            if factor is not None:
                raised = damp / mean if damp > least else None
                return Hessian(order, damping, factor, raised)
            if damp >= mean:
                return None
            damp = min(mean, max(10 * damp, 1e-4 * mean))


class GptaqTarget(GptqTarget):
    """Targets, for GPTAQ, the outputs of the float network, as far as columns that are rounded
    later can make up for the change of an input.
    """

    settings: GPTAQConfig
    needs_float = True

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return W (I + alpha P), with P = triu(dXX U^T, 1) U, U^T U = H^-1 and dXX the drift.

        Row i of P is what the columns after i add to make up for the error of input i (the
        paper's parallel form). W is the float weight in all columns. The authors' code uses
        each column as the errors before it have left it; the difference was too small to
        measure.
        """
        assert products.drift is not None
        M, D = hessian.factor.M, hessian.factor.D
        dXX = _permuted_matrix(products.drift, hessian.order)
        # U = D^-1/2 M^-1, so P = triu(dXX M^-T, 1) D^-1 M^-1
        dXX_U = torch.linalg.solve_triangular(M, dXX.T, upper=True, unitriangular=True).T
        later = dXX_U.triu(1) / D
        P = torch.linalg.solve_triangular(M, later, upper=True, left=False, unitriangular=True)
        return torch.addmm(W, P.T, W, alpha=self.settings.alpha), None


class QronosTarget(GptqTarget):
    """Targets, for Qronos, the outputs of the float network, by the weight that fits them best
    on the inputs of the quantized network.
    """

    settings: QronosConfig
    needs_float = True
    tokens_per_input = 4

    def damping(self, gram: Tensor) -> float:
        """Return a share of the largest eigenvalue."""
        return self.settings.alpha * float(leading(gram, POWER_ITERATIONS).norm())

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return W + W dXX H^-1 with dXX the drift, and a first column of its own.

        The first column is rounded as if the others stayed W. From the second on, the paper
        refits the columns that are left, as GPTQ does with this target.
        """
        assert products.drift is not None
        M, D = hessian.factor.M, hessian.factor.D
        W_dXX = _permuted_matrix(products.drift, hessian.order).T @ W
        # H^-1 = M^-T D^-1 M^-1
        fit = torch.linalg.solve_triangular(M, W_dXX, upper=True, unitriangular=True)
        fit = fit / D[:, None]
        fit = torch.linalg.solve_triangular(M.T, fit, upper=False, unitriangular=True)
        first = hessian.order[0]
        H_first = products.gram[first, first] + hessian.damping[0]
        return W + fit, W[0] + W_dXX[0] / H_first


def _permuted_matrix(matrix: Tensor, order: Tensor) -> Tensor:
    """Permute rows and columns; `index_select` takes a third of the time of an index."""
    return matrix.index_select(0, order).index_select(1, order)


def _mean_diagonal(gram: Tensor) -> float:
    """Return the mean over columns that were not always zero, or 1 if there are none."""
    diagonal = gram.diagonal()
    live = diagonal[diagonal != 0]
    return float(live.mean()) if len(live) else 1.0
