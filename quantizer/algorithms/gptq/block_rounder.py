"""Round the columns of one block of a weight, one after the other; see `rows.round_columns`.

On a GPU, the few hundred small operations of some columns are recorded once as a CUDA graph and
replayed. Launching them one by one takes several times as long as they run.
"""

# ruff: noqa: N803, N806 - the paper's letters
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantizer.numerics.blocks import Kernel, Rounder

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

    def part(self, columns: slice) -> "ColumnValues":
        """Return views of some of the columns."""
        return ColumnValues(
            self.current[columns], self.W[columns], self.Q[columns], self.E[columns]
        )


def block_rounder(W: Tensor, columns: ColumnScales) -> "BlockRounder":
    """Return what rounds the blocks of a weight [depth, rows]."""
    if W.is_cuda and len(W) >= _WORTH_A_GRAPH:
        return ReplayedRounder(columns)
    return BlockRounder(columns)


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
        self._replay: Callable[[], None] | None = None
        self._is_warm = False
        rows = columns.scale.shape[1]
        shape = (INNER_COLUMNS, rows)
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
        end = first + count
        numbers = columns.index[first:end]
        # Columns beyond the last one change nothing that is read
        inner = slice(0, count)
        self._scale[inner] = columns.scale[numbers]
        self._zero_point[inner] = columns.zero_point[numbers]
        self._M_rows[inner, inner] = M_rows
        fixed = self._values.part(inner)
        fixed.current.copy_(values.current)
        fixed.W.copy_(values.W)
        self._run()
        values.current.copy_(fixed.current)
        values.Q.copy_(fixed.Q)
        values.E.copy_(fixed.E)

    def _run(self) -> None:
        if self._replay is not None:
            self._replay()
        elif self._is_warm:
            self._replay = record_graph(self._round_fixed)
            self._replay()
        else:
            # Libraries allocate at their first call, which must not be recorded
            self._round_fixed()
            self._is_warm = True

    def _round_fixed(self) -> None:
        scales = self._scale.unbind()
        rounders = []
        for zero_point in self._zero_point.unbind():
            rounder = self._columns.kernel.rounder(zero_point)
            rounders.append(rounder)
        _round_one_by_one(self._values, self._M_rows, scales, rounders)


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
