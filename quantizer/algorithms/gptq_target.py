"""What a rounding algorithm aims at, as far as GPTQ and its kin differ. Rounds nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.algorithms.optimal_rounding import Factor, factored
from quantizer.config.algorithms import ColumnRounding


@dataclass(frozen=True)
class Products:
    """Sums over all tokens x of one group of channels, [depth, depth].

    `gram` is that of x x^T; `drift` that of (f - x) x^T, where f is the same token in the float network, if known.
    """

    gram: Tensor
    drift: Tensor | None = None


@dataclass(frozen=True)
class Hessian:
    """A Gram matrix made ready: columns in the `order` in which they are rounded, `damping` [depth] added to their
    diagonal, in `factor`s. `raised` is the damping as a share of the mean diagonal if it had to be more than asked."""

    order: Tensor
    damping: Tensor
    factor: Factor
    raised: float | None

    def permuted(self, matrix: Tensor) -> Tensor:
        """A matrix [depth, depth] with its rows and columns in this order."""
        return matrix[self.order][:, self.order]


class GptqTarget:
    """GPTQ's: the outputs that the float weight gives for the inputs of the network as it is rounded so far."""

    needs_float = False
    """Whether it looks at the inputs of the float network as well."""
    tokens_per_input = 0
    """How many tokens there should be for each input channel; on fewer what it finds may not hold for other data."""

    def __init__(self, settings: ColumnRounding) -> None:
        self.settings = settings

    def damping(self, gram: Tensor) -> float:
        """What is added to the diagonal at first, in units of `gram`."""
        return self.settings.damp_percent * _mean_diagonal(gram)

    def target(self, weight: Tensor, hessian: Hessian, products: Products) -> tuple[Tensor, Tensor | None]:
        """The weight to come near to [depth, rows] instead of `weight`, and what to round for its first column."""
        return weight, None

    def hessian(self, gram: Tensor, *, by_size: bool) -> Hessian | None:
        """The matrix made ready, with the damping ten times as large until it is positive definite.

        Args:
            gram: [depth, depth].
            by_size: round columns with large inputs first.

        Returns:
            None if not even the whole mean diagonal as damping helps.
        """
        diagonal = gram.diagonal()
        depth = len(diagonal)
        order = diagonal.argsort(descending=True, stable=True) if by_size else torch.arange(depth, device=gram.device)
        mean, asked = _mean_diagonal(gram), self.damping(gram)
        damp = asked
        while True:
            damping = torch.where(diagonal == 0, mean, damp)[order]  # a column of zeros stays on its own
            damped = gram[order][:, order]
            damped.diagonal().add_(damping)
            factor = factored(damped)
            if factor is not None:
                return Hessian(order, damping, factor, damp / mean if damp > asked else None)
            if damp >= mean:
                return None
            damp = min(mean, max(10 * damp, 1e-4 * mean))


def _mean_diagonal(gram: Tensor) -> float:
    """Over the columns that were not always zero; 1 if there are none."""
    live = gram.diagonal()[gram.diagonal() != 0]
    return float(live.mean()) if len(live) else 1.0
