"""Round a weight column by column; the columns not yet rounded make up for the errors so far.

This is GPTQ (W, H, Q as in its paper) with other factors of H. The paper updates all later
columns by the inverse of H. Here H = M diag(D) M^T with M unit upper triangular. Column j is
rounded at W_j + sum over i < j of (W_i - Q_i) M_ij. This gives the same Q (QuIP, theorem 6).
Weights are transposed, [depth, rows], so that a column of W is contiguous in memory.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323); Chee et al. 2023, "QuIP" (arXiv
2307.13304), theorem 6.
"""

# ruff: noqa: N803, N806 - the paper's letters
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.algorithms.gptq.block_rounder import ColumnScales, ColumnValues, block_rounder

BeginBlock = Callable[[int, Tensor], None]
"""Called with the first column of a block and the block, [at most block_size, rows]."""


@dataclass(frozen=True)
class Factor:
    """Holds M and D of H = M diag(D) M^T, with M unit upper triangular [depth, depth] and D
    [depth].
    """

    M: Tensor
    D: Tensor


def factorize(H: Tensor) -> Factor | None:
    """Return the factors of a symmetric matrix, or None if it is not positive definite.

    >>> factor = factorize(torch.tensor([[5.0, 2.0], [2.0, 1.0]]))
    >>> factor.M.tolist(), factor.D.tolist()
    ([[1.0, 2.0], [0.0, 1.0]], [1.0, 1.0])
    """
    # The Cholesky factor of the flipped matrix is the upper triangular one of H, flipped
    L, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    M = L.flip(0, 1)
    root = M.diagonal().clone()
    if info or not root.isfinite().all():
        return None
    return Factor(M.div_(root), root.square_())


def round_columns(
    W: Tensor,
    factor: Factor,
    columns: ColumnScales,
    *,
    block_size: int,
    begin: BeginBlock | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round W greedily, column by column, so that tr((W - Q) H (W - Q)^T) is small.

    Args:
        W: float32 [depth, rows], transposed.
        factor: of H.
        columns: the scales.
        block_size: columns in a block, B in the paper. The errors of a block reach later
            blocks in one product. It does not change Q except by float32's noise.
        begin: called before each block with the weights that GPTQ would have there, updated
            by all earlier blocks. May change the scales of the block's columns in place.
        first: what to round for the first column [rows], if not W.

    Returns:
        Q [depth, rows], each value a code times its scale, and the error of each row, float64
            [rows].

    >>> one, none = torch.ones(1, 1), torch.zeros(1, 1)
    >>> columns = ColumnScales(
    ...     lambda zero_point: torch.Tensor.round_, one, none, torch.tensor([0, 0])
    ... )
    >>> factor = factorize(torch.tensor([[2.0, 1.0], [1.0, 1.0]]))
    >>> round_columns(torch.tensor([[0.4], [0.3]]), factor, columns, block_size=128)
    (tensor([[0.],
            [1.]]), tensor([0.2500], dtype=torch.float64))
    """
    M, D = factor.M, factor.D
    Q = torch.empty_like(W)
    E = torch.empty_like(W)
    rounder = block_rounder(W, columns)
    error = torch.zeros(W.shape[1], dtype=torch.float64, device=W.device)
    depth = len(W)
    for start in range(0, depth, block_size):
        end = min(start + block_size, depth)
        block = slice(start, end)
        M_block = M[block, block]
        earlier_errors = E[:start]
        current = torch.addmm(W[block], M[:start, block].T, earlier_errors)
        if begin is not None:
            updated = _updated_by_paper(W[block], current, M_block)
            begin(start, updated)
            rounder.reread_scales()
        if first is not None and start == 0:
            current[0] = first
        values = ColumnValues(current, W[block], Q[block], E[block])
        rounder.round_block(start, values, M_block)
        if start == 0:
            # The error is that to W, whatever was rounded for the first column
            current[0] = W[0]
        current.sub_(Q[block])
        current.square_()
        block_error = D[block] @ current
        error += block_error.double()
    return Q, error


def _updated_by_paper(
    W: Tensor,
    current: Tensor,
    M: Tensor,
) -> Tensor:
    """Return a block as the paper has it: all of its columns make up for the errors so far.

    In `current`, column j takes the columns before it as W has them.
    """
    update: Tensor = torch.linalg.solve_triangular(
        M.T, current - W, upper=False, unitriangular=True
    )
    return update + W
