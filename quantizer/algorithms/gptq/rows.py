"""Round a weight column by column; the columns not yet rounded make up for the errors so far.

This is GPTQ (W, H, Q as in its paper) with other factors of H. The paper updates all later
columns by the inverse of H. Here H = M diag(D) M^T with M unit upper triangular. Column j is
rounded at W_j + sum over i < j of (W_i - Q_i) M_ij. This gives the same Q (QuIP, theorem 6).

A column of W is a row of the tensors here: weights are transposed, [depth, rows], so that a
column is contiguous in memory. Columns are in the order in which they are rounded.

On a GPU, the few hundred small operations of some columns are recorded once as a CUDA graph and
replayed. Launching them one by one takes several times as long as they run.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323); Chee et al. 2023, "QuIP" (arXiv
2307.13304), theorem 6.
"""

# ruff: noqa: N803, N806 - the paper's letters
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, Rounder

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


@dataclass(frozen=True)
class Factor:
    """Holds M, unit upper triangular [depth, depth], and D [depth] of H = M diag(D) M^T."""

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
        # Whether each group is rounded before the next one begins
        self._is_in_order = bool((torch.cat([*groups.columns]).diff() > 0).all())
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


INNER_COLUMNS = 32
"""Errors reach this many columns one by one, and the columns after them in one product."""
_WORTH_A_GRAPH = 8 * INNER_COLUMNS
"""Recording a graph takes as long as rounding a few times INNER_COLUMNS."""


@dataclass(frozen=True)
class ColumnScales:
    """Holds the scale and zero point of each column of W.

    Attributes:
        kernel: makes codes of values divided by their scale, as in `numerics.blocks.fill`.
        scale, zero_point: float32 [scales, rows].
        index: the scale that each column has, int64 [depth].
    """

    kernel: Kernel
    scale: Tensor
    zero_point: Tensor
    index: Tensor


@dataclass(frozen=True)
class ColumnValues:
    """Holds some columns, [columns, rows] each: the values to round, W, and room for Q and for
    E = W - Q.
    """

    current: Tensor
    W: Tensor
    Q: Tensor
    E: Tensor

    def part(self, columns: slice) -> ColumnValues:
        """Return views of some of the columns."""
        return ColumnValues(
            self.current[columns], self.W[columns], self.Q[columns], self.E[columns]
        )


def block_rounder(W: Tensor, columns: ColumnScales) -> BlockRounder:
    """Return what rounds the blocks of a weight [depth, rows]."""
    if is_worth_a_graph(W):
        return ReplayedRounder(columns)
    return BlockRounder(columns)


def is_worth_a_graph(W: Tensor) -> bool:
    """Check whether the operations on a weight's columns, [depth, rows], are recorded."""
    return W.is_cuda and len(W) >= _WORTH_A_GRAPH


class BlockRounder:
    """Rounds the blocks of a weight.

    Args:
        columns: the scales. Call `reread_scales` after a change in place.
    """

    def __init__(self, columns: ColumnScales) -> None:
        self._columns = columns
        self.reread_scales()

    @cached_property
    def _index(self) -> list[int]:
        # Copied to the CPU once, as every copy waits for the device
        index: list[int] = self._columns.index.tolist()
        return index

    # In operations this small, a fifth of the time goes to finding out that there is no
    # gradient
    @torch.inference_mode()
    def round_block(self, first: int, values: ColumnValues, M: Tensor) -> None:
        """Write Q and E of one block, and to `current` what each column was before it was
        rounded.

        Args:
            first: the number of the block's first column.
            values: of the block's columns. The errors of earlier blocks are in `current`.
            M: of the block, [columns, columns].
        """
        count = len(values.current)
        for start in range(0, count, INNER_COLUMNS):
            inner = slice(start, start + INNER_COLUMNS)
            part = values.part(inner)
            if start:
                earlier_errors = values.E[:start]
                part.current.addmm_(M[:start, inner].T, earlier_errors)
            M_rows = M[inner, inner].T.contiguous()
            self._round_part(first + start, part, M_rows)

    def reread_scales(self) -> None:
        """Take the scales as they are now."""
        columns = self._columns
        zero_points: Sequence[Tensor | int] = columns.zero_point.unbind()
        # Without zero points there is less to do; on a GPU, asking costs more than that
        if columns.zero_point.is_cpu and not columns.zero_point.any():
            zero_points = [0] * len(columns.scale)
        self._scales = columns.scale.unbind()
        self._rounders = [columns.kernel.rounder(zero_point) for zero_point in zero_points]

    def _round_part(self, first: int, values: ColumnValues, M_rows: Tensor) -> None:
        end = first + len(M_rows)
        scales = []
        rounders = []
        for number in self._index[first:end]:
            scales.append(self._scales[number])
            rounders.append(self._rounders[number])
        _round_one_by_one(values, M_rows, scales, rounders)


class ReplayedRounder(BlockRounder):
    """Rounds on a GPU. Tensors at fixed places take what the recorded operations read and
    write.
    """

    def __init__(self, columns: ColumnScales) -> None:
        super().__init__(columns)
        self._replay = Replay()
        shape = INNER_COLUMNS, columns.scale.shape[1]
        self._M_rows = columns.scale.new_empty(INNER_COLUMNS, INNER_COLUMNS)
        self._scale = columns.scale.new_ones(shape)
        self._zero_point = columns.zero_point.new_zeros(shape)
        current, W, Q, E = columns.scale.new_zeros(4, *shape)
        self._values = ColumnValues(current, W, Q, E)

    def reread_scales(self) -> None:
        """Leave the scales, which are read when columns are rounded."""

    def _round_part(self, first: int, values: ColumnValues, M_rows: Tensor) -> None:
        columns = self._columns
        count = len(M_rows)
        numbers = columns.index[first : first + count]
        # Columns beyond the last one change nothing that is read
        inner = slice(0, count)
        self._scale[inner] = columns.scale[numbers]
        self._zero_point[inner] = columns.zero_point[numbers]
        self._M_rows[inner, inner] = M_rows
        fixed = self._values.part(inner)
        fixed.current.copy_(values.current)
        fixed.W.copy_(values.W)
        self._replay(self._round_fixed)
        values.current.copy_(fixed.current)
        values.Q.copy_(fixed.Q)
        values.E.copy_(fixed.E)

    def _round_fixed(self) -> None:
        scales = self._scale.unbind()
        rounders = []
        for zero_point in self._zero_point.unbind():
            rounder = self._columns.kernel.rounder(zero_point)
            rounders.append(rounder)
        _round_one_by_one(self._values, self._M_rows, scales, rounders)


class Replay:
    """Runs operations on the same memory: once as they are, and then as a recorded graph."""

    def __init__(self) -> None:
        self._calls = 0
        self._recorded: Callable[[], None] | None = None

    def __call__(self, operations: Callable[[], None]) -> None:
        """Run the operations, which are the same ones in each call."""
        self._calls += 1
        # Libraries allocate at their first call, which must not be recorded
        if self._calls == 2:
            self._recorded = record_graph(operations)
        (self._recorded or operations)()


def record_graph(operations: Callable[[], None]) -> Callable[[], None]:
    """Record what a function does on the current GPU, and return what repeats it on the same
    memory.
    """
    # torch.cuda.graph would also empty the caches of the allocator
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Other threads go on allocating
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            operations()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _round_one_by_one(
    values: ColumnValues, M_rows: Tensor, scales: Sequence[Tensor], rounders: Sequence[Rounder]
) -> None:
    """Write Q and E of some columns, and to `current` what each was before it was rounded.

    Args:
        values: of the columns.
        M_rows: M of these columns, transposed and contiguous.
        scales, rounders: of each column.
    """
    E_columns = values.E.T
    steps = zip(
        values.current.unbind(),
        values.W.unbind(),
        values.Q.unbind(),
        values.E.unbind(),
        M_rows.unbind(),
        scales,
        rounders,
        strict=True,
    )
    for j, step in enumerate(steps):
        column, w, q, e, M_row, scale, round_ = step
        if j:
            earlier_errors = E_columns[:, :j]
            column.addmv_(earlier_errors, M_row[:j])
        torch.div(column, scale, out=q)
        round_(q)
        q.mul_(scale)
        torch.sub(w, q, out=e)
