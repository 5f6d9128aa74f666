"""Stores what an observer has seen: the range of each batch, or one histogram of all batches.
The values themselves are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.distributed import merge_in_batch_order
from quantizer.numerics.histogram import Histogram
from quantizer.observers.methods import ranges_of
from quantizer.observers.observed_batch import (
    CountedBatches,
    LowHigh,
    ObservedBatch,
    PooledBatches,
    slices,
)
from quantizer.tables import RANGE_METHODS

ROWS_AT_ONCE = 1 << 10
"""How many rows get their ranges in one call. Their histograms of 4096 bins take 32 MB, and the
candidates of the method "diffs" 84 MB.
"""
ROWS_TO_DELAY = 16
"""With at most so many rows, the range is computed after the batch has passed all layers, for
many tensors together.
"""
_FIRST_CAPACITY = 16
"""For how many batches a buffer of few rows has room at first."""


class RangeMemory:
    """Stores four values of each batch and row: low and high of the method's range, the least
    value and the greatest.

    They are in one tensor (B, 4, R) with room for more batches. Small tensors for each batch
    would be between the large activations of a forward pass and fragment the memory. That took
    three times as much memory.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        self.spec = spec
        self._buffer = torch.empty(0, 4, 0, dtype=torch.float64)
        self._count = 0
        # The last batch, if its range is still to be computed, and memory for its counts
        self._pending: CountedBatches | None = None
        self._pending_counts: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether no batch was added."""
        return not self._count

    def add(self, x: Tensor, batch: ObservedBatch) -> None:
        """Store the range and the extremes of a batch. Those of few rows are computed later."""
        compute_pending_ranges([self])
        rows = len(batch.low)
        if self._count == len(self._buffer):
            self._grow(rows)
        self._buffer[self._count, 2] = batch.low
        self._buffer[self._count, 3] = batch.high
        self._count += 1
        reads = RANGE_METHODS[self.spec.method].reads
        if reads == "extremes":
            # All rows fit at once
            self._set_last_range(*ranges_of(batch, self.spec))
        elif rows <= ROWS_TO_DELAY and reads == "histogram":
            self._delay(batch)
        else:
            lows = []
            highs = []
            rows_at_once = ROWS_AT_ONCE
            if self.spec.has_searched_scale:
                # Scales of a super-block are found together
                rows_at_once = rows
            for part in batch.split(rows_at_once):
                low, high = ranges_of(part, self.spec)
                lows.append(low)
                highs.append(high)
            self._set_last_range(torch.cat(lows), torch.cat(highs))

    def _grow(self, rows: int) -> None:
        """Double the buffer, so that adding a batch takes constant time on average."""
        first_capacity = _FIRST_CAPACITY if rows < ROWS_AT_ONCE else 1
        capacity = max(self._count, first_capacity)
        new = torch.empty(capacity, 4, rows, dtype=torch.float64)
        self._buffer = torch.cat([self._buffer, new]) if self._count else new

    def _delay(self, batch: ObservedBatch) -> None:
        """Store the counts of a batch until its range is needed.

        All batches use the same tensor: new small tensors for each would fragment the memory.
        """
        counted = batch.counted()
        if self._pending_counts is None or self._pending_counts.shape != counted.counts.shape:
            # A count is at most the size of a sample
            self._pending_counts = torch.empty_like(counted.counts, dtype=torch.int32)
        self._pending_counts.copy_(counted.counts)
        self._pending = replace(counted, counts=self._pending_counts)

    def _set_last_range(self, low: Tensor, high: Tensor) -> None:
        """Set the method's range of the last batch."""
        self._pending = None
        self._buffer[self._count - 1, 0] = low
        self._buffer[self._count - 1, 1] = high

    def ranges(self) -> LowHigh:
        """Return the range of each batch, (B, R)."""
        batches = self._batches()
        return batches[:, 0], batches[:, 1]

    def extremes(self) -> LowHigh:
        """Return the least and the greatest value seen in each row, (R,) float64."""
        batches = self._batches()
        return batches[:, 2].amin(0), batches[:, 3].amax(0)

    def forget_after(self, batches: int) -> None:
        """Drop the batches after the first `batches`."""
        if self._count > batches:
            self._count = batches
            self._pending = None

    def merge(self, *others: Memory) -> None:
        """Add the batches of other memories of this kind, one of each memory in turn.

        Ranks have read them in that order.
        """
        columns = []
        for other in others:
            assert isinstance(other, RangeMemory)
            columns.append(list(other._batches()))
        batches = merge_in_batch_order(columns)
        if not batches:
            return
        merged = torch.stack(batches)
        if self._count:
            merged = torch.cat([self._batches(), merged])
        self._replace(merged)

    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor, whose size grows with the rows, by `keep` of it, which may move
        it to disk.
        """
        # The clone has no room for more batches
        self._buffer = keep(self._batches().clone())

    def state_dict(self) -> dict[str, Tensor]:
        """Return one tensor "batches", float64 (B, 4, R), 32 bytes per batch and row. It is
        (0, 4, 0) without batches.
        """
        return {"batches": self._batches().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by the tensor "batches" of `state_dict`."""
        batches = state.get("batches", torch.empty(0))
        if set(state) != {"batches"} or batches.ndim != 3 or batches.shape[1] != 4:
            raise ValueError(
                'An observer\'s state is one tensor "batches" of shape (B, 4, R), not '
                f"{sorted(state)}."
            )
        self._replace(batches.double())

    def _batches(self) -> Tensor:
        """Return low, high, least and greatest value of the batches so far, (B, 4, R)."""
        compute_pending_ranges([self])
        return self._buffer[: self._count]

    def _replace(self, batches: Tensor) -> None:
        self._buffer = batches
        self._count = len(batches)
        self._pending = None


def compute_pending_ranges(memories: Iterable[Memory]) -> None:
    """Compute the ranges of last batches that are not computed yet.

    Each use of a memory computes its own. To compute those of many tensors with one spec
    together takes a fraction of the time.
    """
    by_spec: dict[QuantizationSpec, list[RangeMemory]] = {}
    for memory in memories:
        if isinstance(memory, RangeMemory) and memory._pending is not None:
            by_spec.setdefault(memory.spec, []).append(memory)
    for spec, alike in by_spec.items():
        batches = [memory._pending for memory in alike if memory._pending is not None]
        low, high = ranges_of(CountedBatches.stacked(batches), spec)
        rows = [len(batch.low) for batch in batches]
        lows = torch.split(low, rows)
        highs = torch.split(high, rows)
        for memory, memory_low, memory_high in zip(alike, lows, highs, strict=True):
            memory._set_last_range(memory_low, memory_high)


class PooledMemory:
    """Stores one histogram of all batches except the last, and one of the last batch, which may
    still be dropped.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        self.spec = spec
        self._pool: Histogram | None = None
        self._last: Histogram | None = None
        self._batch_count = 0

    @property
    def is_empty(self) -> bool:
        """Return whether no batch was added."""
        return self._pool is None and self._last is None

    def add(self, x: Tensor, batch: ObservedBatch) -> None:
        """Make a histogram of a batch, and merge the one before into the pool."""
        # A sample of the values, each of which stands for `weight` of them
        rows, weight = batch.rows, 1
        if self.spec.has_one_scale:
            rows, weight = slices(x)
        outermost = None
        if batch.outermost is not None and weight != 1:
            # The sample may leave out the outermost values, which matter most
            outermost = at_least_float32(batch.outermost).to(rows.device)
        last = Histogram.of(
            at_least_float32(rows), batch.low, batch.high, weight=weight, extra=outermost
        )
        self._append(last, 1)

    def _append(self, histogram: Histogram, batches: int) -> None:
        """Merge the last histogram into the pool, and make `histogram` the last."""
        self._pool = self._merged()
        self._last = histogram
        self._batch_count += batches

    def ranges(self) -> LowHigh:
        """Return one range for all batches, (1, R)."""
        low, high = ranges_of(PooledBatches(self._histogram()), self.spec)
        return low[None], high[None]

    def extremes(self) -> LowHigh:
        """Return the least and the greatest value seen in each row, (R,) float64."""
        histogram = self._histogram()
        return histogram.low, histogram.high

    def forget_after(self, batches: int) -> None:
        """Drop the batches after the first `batches`."""
        if self._batch_count > batches:
            self._last = None
            self._batch_count -= 1

    def merge(self, *others: Memory) -> None:
        """Add the batches of other memories of this kind."""
        for other in others:
            assert isinstance(other, PooledMemory)
            if not other.is_empty:
                self._append(other._histogram(), other._batch_count)

    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Leave the histograms where they are."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the histogram and the number of "batches", which is alone
        without batches.
        """
        histogram = self._merged()
        state = {"batches": torch.tensor(self._batch_count)}
        if histogram is not None:
            state.update(histogram.to_tensors())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a histogram and a number of batches."""
        tensors = dict(state)
        batches = tensors.pop("batches", None)
        if batches is None or batches.ndim:
            raise ValueError(
                'An observer\'s state is a histogram and the number of "batches", not '
                f"{sorted(state)}."
            )
        self._pool = Histogram.from_tensors(tensors) if tensors else None
        self._last = None
        self._batch_count = int(batches)

    def _merged(self) -> Histogram | None:
        """Return the histogram of all batches, or None without batches."""
        if self._pool is None or self._last is None:
            return self._pool or self._last
        return self._pool.merge(self._last)

    def _histogram(self) -> Histogram:
        histogram = self._merged()
        assert histogram is not None
        return histogram


Memory = RangeMemory | PooledMemory
"""What an observer has seen."""


def memory_of(spec: QuantizationSpec) -> Memory:
    """Return an empty memory of the kind that the statistic needs."""
    return PooledMemory(spec) if spec.statistic == POOLED else RangeMemory(spec)


def at_least_float32(rows: Tensor) -> Tensor:
    """Return rows of half precision as float32, and others as they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).contiguous()
