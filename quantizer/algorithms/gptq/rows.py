"""One column of a weight after the other is rounded, and the columns after it make up for the
error.

GPTQ with the names of its paper: W, H, Q, B columns in a block. Instead of the inverse of H it
takes the factors H = M D M^T with M unit upper triangular, and rounds column j at W_j + (W -
Q)_{<j} M_{<j, j}: the same. Matrices of weights are transposed, [depth, rows], so that a column
of W is a run of memory.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323); Chee et al. 2023, "QuIP" (arXiv
2307.13304), theorem 6.
"""

# ruff: noqa: N803, N806 - the paper's letters
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel

# Columns that reach each other one by one; the others get the errors of so many in one product
INNER = 32


@dataclass(frozen=True)
class Columns:
    """The scales of each column of W: scale and zero point [kinds, rows], float32, and which of
    them each column has.

    `kernel` makes codes of values that are divided by their scale, as `numerics.blocks.fill`
    uses it.
    """

    kernel: Kernel
    scale: Tensor
    zero_point: Tensor
    kind: Tensor


@dataclass(frozen=True)
class Factor:
    """H = M diag(D) M^T: `M` [depth, depth] with ones on its diagonal and zeros below it, `D`
    [depth].
    """

    M: Tensor
    D: Tensor


def factored(H: Tensor) -> Factor | None:
    """The factors of a symmetric matrix; None if it is not positive definite.

    >>> found = factored(torch.tensor([[5.0, 2.0], [2.0, 1.0]]))
    >>> found.M.tolist(), found.D.tolist()
    ([[1.0, 2.0], [0.0, 1.0]], [1.0, 1.0])
    """
    L, info = torch.linalg.cholesky_ex(H.flip(0, 1))
    M = L.flip(0, 1)
    root = M.diagonal().clone()
    if info or not root.isfinite().all():
        return None
    return Factor(M.div_(root), root.square_())


def optimal_rounding(
    W: Tensor,
    factor: Factor,
    columns: Columns,
    B: int,
    begin: Callable[[int, Tensor], None] | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round W so that tr((W - Q) H (W - Q)^T) is small, greedily in the order of the columns.

    Args:
        W: float32 [depth, rows], transposed.
        factor: of H.
        columns: their scales.
        B: columns in a block, whose errors reach the later blocks in one product; no more than
            that hangs on it.
        begin: called with the first column of each block and the block [at most B, rows] as
            GPTQ has it then, with all of the block free to make up for the errors so far; may
            change the scales of its columns in place.
        first: what to round for the first column [rows], if not W.

    Returns:
        Q [depth, rows], each value a code times its scale, and the error of each row, float64
            [rows].

    >>> one, none = torch.ones(1, 1), torch.zeros(1, 1)
    >>> columns = Columns(
    ...     lambda zero_point: torch.Tensor.round_, one, none, torch.tensor([0, 0])
    ... )
    >>> H = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    >>> optimal_rounding(torch.tensor([[0.4], [0.3]]), factored(H), columns, 128)
    (tensor([[0.],
            [1.]]), tensor([0.2500], dtype=torch.float64))
    """
    Q, E = torch.empty_like(W), torch.empty_like(W)
    kind = columns.kind.tolist()  # here, as it makes the CPU wait for the device
    error = torch.zeros(W.shape[1], dtype=torch.float64, device=W.device)
    for start in range(0, len(W), B):
        here = slice(start, min(start + B, len(W)))
        block = torch.addmm(W[here], factor.M[:start, here].T, E[:start])
        if begin is not None:
            # Column j of `block` takes those before it in the block as W has them
            inner = factor.M[here, here].T
            free = torch.linalg.solve_triangular(
                inner, block - W[here], upper=False, unitriangular=True
            )
            begin(start, free + W[here])
        if first is not None and start == 0:
            block[0] = first
        _round_block(
            block, factor.M[here, here], columns, kind[here], W[here], (Q[here], E[here])
        )
        if start == 0:
            block[0] = W[0]
        error += (factor.D[here] @ block.sub_(Q[here]).square_()).double()
    return Q, error


# Of operations so small, a fifth of the time is to find out that there is no gradient
@torch.inference_mode()
def _round_block(
    block: Tensor,
    M: Tensor,
    columns: Columns,
    kind: list[int],
    W: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """Round columns that the errors of earlier blocks have reached; writes Q and E = W - Q, and
    to `block` what each column was before it was rounded.
    """
    Q, E = out
    zero_points = (
        columns.zero_point.unbind() if columns.zero_point.any() else itertools.repeat(0)
    )
    codings = [*zip(columns.scale.unbind(), map(columns.kernel, zero_points), strict=False)]
    rows = [
        *zip(
            map(codings.__getitem__, kind),
            W.unbind(),
            block.unbind(),
            Q.unbind(),
            E.unbind(),
            strict=True,
        )
    ]
    for start in range(0, len(block), INNER):
        here = slice(start, start + INNER)
        if start:
            block[here].addmm_(M[:start, here].T, E[:start])
        reach, errors = M[here, here].T.contiguous().unbind(), E[here].T
        for j, ((scale, codes), own, w, q, e) in enumerate(rows[here]):
            if j:
                w.addmv_(errors[:, :j], reach[j][:j])
            codes(torch.div(w, scale, out=q)).mul_(scale)
            torch.sub(own, q, out=e)
