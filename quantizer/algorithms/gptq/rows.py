"""Round a weight column by column; the columns not yet rounded make up for the errors so far.

This is GPTQ (W, H, Q as in its paper) with other factors of H. The paper updates all later
columns by the inverse of H. Here H = M diag(D) M^T with M unit upper triangular. Column j is
rounded at W_j + sum over i < j of (W_i - Q_i) M_ij. This gives the same Q (QuIP, theorem 6).

A column of W is a row of the tensors here: weights are transposed, [depth, rows], so that a
column is contiguous in memory. Columns are in the order in which they are rounded.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323); Chee et al. 2023, "QuIP" (arXiv
2307.13304), theorem 6.
"""

# ruff: noqa: N803, N806 - the paper's letters
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from quantizer.algorithms.gptq.block_rounder import ColumnScales, ColumnValues, block_rounder

BeginGroup = Callable[[int, Tensor], None]
"""Called with the number of a group and its updated columns, float32 [columns, rows]."""


@dataclass(frozen=True)
class OpenGroups:
    """Holds groups of columns whose scales are found when their first column comes.

    Attributes:
        columns: for each group the numbers of its columns in the order of rounding, int64
            [columns]. They are listed in the order of the weight.
        begin: called before a group's first column is rounded, with its columns as the paper
            has them then: all columns left make up for the errors so far. It may change the
            group's scales in place.
    """

    columns: Sequence[Tensor]
    begin: BeginGroup

    @cached_property
    def by_first(self) -> dict[int, int]:
        """Return the number of each group by its first column in the order of rounding."""
        firsts = torch.stack([columns.min() for columns in self.columns])
        return {first: group for group, first in enumerate(firsts.tolist())}

    @property
    def is_in_order(self) -> bool:
        """Return whether each group is rounded before the next one begins."""
        places = torch.cat([*self.columns])
        return bool((places.diff() > 0).all())


@dataclass(frozen=True)
class Factor:
    """Holds M and D of H = M diag(D) M^T, with M unit upper triangular [depth, depth] and D
    [depth].
    """

    M: Tensor
    D: Tensor


def factorize(H: Tensor) -> Factor | None:
    """Return the factors of a symmetric matrix [depth, depth], or None if it is not positive
    definite.

    >>> factor = factorize(torch.tensor([[5.0, 2.0], [2.0, 1.0]]))
    >>> factor.M.tolist(), factor.D.tolist()
    ([[1.0, 2.0], [0.0, 1.0]], [1.0, 1.0])
    """
    # Flipped in both axes, the lower triangular factor becomes an upper triangular one of H
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
    groups: OpenGroups | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round W greedily, column by column, so that tr((W - Q) H (W - Q)^T) is small.

    Args:
        W: float32 [depth, rows], transposed.
        factor: M and D of H.
        columns: the scale of each column.
        block_size: the columns in a block, B in the paper. The errors of a block reach later
            blocks in one product. It does not change Q except by float32's noise.
        groups: the groups whose scales are found on the way; None if all scales are known. A
            block ends where a group begins.
        first: what to round instead of W's first column, [rows].

    Returns:
        Q, float32 [depth, rows], each value a code times its scale, and the error of each row,
            float64 [rows].

    >>> one, none = torch.ones(1, 1), torch.zeros(1, 1)
    >>> from quantizer.numerics.fake_quantize import IntegerKernel
    >>> kernel = IntegerKernel.of(-8, 7, "half_even")
    >>> columns = ColumnScales(kernel, one, none, torch.tensor([0, 0]))
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
    starts = [*range(0, len(W), block_size)]
    opener = None
    if groups is not None:
        opener = _GroupOpener(W, M, groups)
        starts = opener.starts(starts)
    for start, end in pairwise([*starts, len(W)]):
        block = slice(start, end)
        M_block = M[block, block]
        earlier_errors = E[:start]
        current = torch.addmm(W[block], M[:start, block].T, earlier_errors)
        if opener is not None and opener.begin(start, current):
            rounder.reread_scales()
        if first is not None and start == 0:
            current[0] = first
        values = ColumnValues(current, W[block], Q[block], E[block])
        rounder.round_block(start, values, M_block)
        # The error of the first column is that of W, also if `first` was rounded instead
        if start == 0:
            current[0] = W[0]
        # Now what rounding has changed in each column
        current.sub_(Q[block])
        if opener is not None:
            opener.record(start, current)
        current.square_()
        block_error = D[block] @ current
        error += block_error.double()
    return Q, error


class _GroupOpener:
    """Calls `OpenGroups.begin` for each group with its columns as the paper has them.

    The paper changes the columns left after each rounded column j. It subtracts row j of M^-1
    times what rounding has changed in column j as it was then. If groups are rounded one after
    the other, the columns of a group follow from one small system of equations. Otherwise the
    changes of all rounded columns are kept.

    Args:
        W: float32 [depth, rows].
        M: unit upper triangular, [depth, depth].
        groups: the groups of columns.
    """

    def __init__(self, W: Tensor, M: Tensor, groups: OpenGroups) -> None:
        self._W = W
        self._M = M
        self._groups = groups
        self._is_in_order = groups.is_in_order
        if self._is_in_order:
            return
        one = torch.eye(len(M), dtype=M.dtype, device=M.device)
        self._inverse = torch.linalg.solve_triangular(M, one, upper=True, unitriangular=True)
        self._changes = torch.empty_like(W)

    def starts(self, of_blocks: list[int]) -> list[int]:
        """Return the first column of each block.

        Args:
            of_blocks: those of blocks without groups.
        """
        starts = set(self._groups.by_first)
        # A block is a group if groups are in order
        if not self._is_in_order:
            starts.update(of_blocks)
        return sorted(starts)

    def begin(self, start: int, current: Tensor) -> bool:
        """Begin the group whose first column is `start`. Return False if there is none.

        Args:
            start: the first column of a block.
            current: the columns of the block [columns, rows], changed by the errors of all
                earlier blocks.
        """
        group = self._groups.by_first.get(start)
        if group is None:
            return False
        if self._is_in_order:
            updated = self._updated_block(start, current)
        else:
            updated = self._updated_columns(start, self._groups.columns[group])
        self._groups.begin(group, updated)
        return True

    def _updated_block(self, start: int, current: Tensor) -> Tensor:
        """Return the columns of a block as the paper has them before the first is rounded."""
        end = start + len(current)
        W_block = self._W[start:end]
        M_block = self._M[start:end, start:end]
        difference = current - W_block
        # The paper's columns U make up for all errors so far: M_block^T (U - W) = difference
        update: Tensor = torch.linalg.solve_triangular(
            M_block.T, difference, upper=False, unitriangular=True
        )
        return update + W_block

    def _updated_columns(self, start: int, columns: Tensor) -> Tensor:
        """Return some columns as the paper has them before column `start` is rounded."""
        inverse = self._inverse[:start, columns]
        changes = self._changes[:start]
        return torch.addmm(self._W[columns], inverse.T, changes, alpha=-1)

    def record(self, start: int, changes: Tensor) -> None:
        """Keep what rounding has changed in the columns of a block, [columns, rows]."""
        if not self._is_in_order:
            end = start + len(changes)
            self._changes[start:end] = changes
