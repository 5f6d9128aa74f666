"""Reads the values of a batch on their device, where nothing waits until the batch has passed.
Then one copy takes the statistics of all observers to the CPU.

A GPU takes longer to start an operation than to read a small tensor. So samples of equal size
are counted together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.granularity import Cut, scale_shape
from quantizer.numerics.histogram import Histogram
from quantizer.observers.memory import (
    ROWS_AT_ONCE,
    ROWS_TO_DELAY,
    PooledMemory,
    RangeMemory,
    at_least_float32,
    compute_pending_ranges,
)
from quantizer.observers.methods import ranges_of
from quantizer.observers.observed_batch import (
    SAMPLE_SIZE,
    SLICE_SIZE,
    CountedBatches,
    ObservedBatch,
    as_rows,
    by_index,
    extremes,
    is_sampled,
    stride_for,
)
from quantizer.observers.observer import ObservationError, Observer, check_has_codes
from quantizer.tables import RANGE_METHODS

_MOST_VALUES = 1 << 26
"""So many values of samples are kept until they are counted: 256 MB of float32."""

_Counted = tuple[Sequence[Observer], CountedBatches]
"""Observers, and the histograms of as many rows for each."""


class _Read(NamedTuple):
    """What was read of a tensor for an observer with one scale.

    Attributes:
        observer: whose it is; None if the values only have to be finite.
        low, high: extremes of the tensor, or of each index of its first axis, (K,).
        sample: values to count, (N,). There are none if the method reads only extremes.
        weight: how many values each of the sample stands for.
    """

    observer: Observer | None
    low: Tensor
    high: Tensor
    sample: Tensor
    weight: int = 1

    def kind(self) -> tuple[object, ...]:
        """Return what tensors have in common that are computed together."""
        spec = None if self.observer is None else self.observer.spec
        sizes = self.low.shape, self.sample.shape, self.weight
        return spec, *sizes, self.low.dtype, self.low.device


@dataclass(frozen=True)
class _Statistics:
    """Statistics on a device of several observers, which have as many rows each.

    Attributes:
        observers: whose they are; None if the values only have to be finite.
        low, high: the extremes of each row.
        others: what else is copied.
        take: gets all of it on the CPU, and lets the observers take it.
    """

    observers: Sequence[Observer | None]
    low: Tensor
    high: Tensor
    others: Sequence[Tensor]
    take: Callable[..., None]

    def check(self, low: Tensor, high: Tensor) -> None:
        """Raise an error for values without a range, on the CPU. It does not say which.

        Raises:
            ObservationError: there is NaN, infinity, or a negative value without a code.
        """
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ObservationError("A batch holds NaN or infinity.")
        least_values = low.view(len(self.observers), -1).amin(1).tolist()
        for observer, least in zip(self.observers, least_values, strict=True):
            if observer is not None:
                check_has_codes(least, observer._code_range)


class DeviceBatch:
    """The values of one batch, which observers are shown."""

    def __init__(self) -> None:
        self._reads: dict[tuple[object, ...], list[_Read]] = {}
        # How many values the samples have
        self._kept = 0
        self._statistics: list[_Statistics] = []
        # By spec and rows: what is counted, of which the ranges are found together
        self._counted: dict[tuple[object, ...], list[_Counted]] = {}
        self._others: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def require_finite(self, x: Tensor) -> None:
        """Look for NaN and infinity."""
        if x.is_floating_point() and x.numel():
            low, high = extremes(as_rows(x))
            self._keep(_Read(None, low, high, low[:0]))

    @torch.no_grad()
    def observe(self, observer: Observer, x: Tensor, companion: Observer | None) -> None:
        """Read what an observer and its companion need of a tensor.

        Raises:
            ObservationError: the tensor has no values, or another number of channels than those
                before.
        """
        by_cut: dict[Cut, list[Observer]] = {}
        for each in (observer, companion):
            if each is not None:
                by_cut.setdefault(each.spec.cut, []).append(each)
        for cut, alike in by_cut.items():
            shape = scale_shape(tuple(x.shape), cut)
            is_refused = not x.numel() or not x.is_floating_point()
            for each in alike:
                is_first = each._memory.is_empty or each._shape is None
                is_refused = is_refused or not (is_first or each._shape == shape)
            if is_refused:
                # It says why
                observer.observe(x)
            if alike[0].spec.has_one_scale:
                self._read_tensor(x, alike)
            else:
                self._read_rows(x, cut, alike)

    def add(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        """Copy another tensor with the statistics, and give the copy to `take`."""
        self._others.append((tensor, take))

    def finish(self) -> None:
        """Copy all statistics to the CPU, and let the observers take them.

        Raises:
            ObservationError: a value is not finite, or has no code. Then no observer has taken
                anything.
        """
        self._count()
        self._statistics += map(_of_counts, self._counted.values())
        tensors = [tensor for tensor, _ in self._others]
        for statistics in self._statistics:
            tensors += [statistics.low, statistics.high, *statistics.others]
        copies = iter(copied(tensors))
        for _, take in self._others:
            take(next(copies))
        parts = []
        for statistics in self._statistics:
            low, high = next(copies), next(copies)
            statistics.check(low, high)
            others = [next(copies) for _ in statistics.others]
            parts.append((low, high, *others))
        for statistics, part in zip(self._statistics, parts, strict=True):
            statistics.take(*part)

    def _read_tensor(self, x: Tensor, observers: Sequence[Observer]) -> None:
        """Read a tensor with one scale."""
        values, weight = as_rows(x), 1
        if is_sampled(x):
            values = by_index(x)
            weight = stride_for(values.shape[1], SLICE_SIZE)
        low, high = extremes(values)
        for observer in observers:
            observer.expect(tuple(x.shape))
            if isinstance(observer._memory, PooledMemory):
                sample = _copy(values[:, ::weight])
                self._keep(_Read(observer, low, high, sample, weight))
                continue
            method = RANGE_METHODS[observer.spec.method]
            if method.reads == "values":
                batch = ObservedBatch(as_rows(x), low.amin()[None], high.amax()[None], tensor=x)
                self._find_range(observer, batch)
                continue
            sample = low[:0]
            if method.reads == "histogram":
                sample = _copy(as_rows(x)[:, :: stride_for(x.numel(), SAMPLE_SIZE)])
            self._keep(_Read(observer, low, high, sample))

    def _read_rows(self, x: Tensor, cut: Cut, observers: Sequence[Observer]) -> None:
        """Read a tensor with several scales."""
        rows = as_rows(x, cut)
        low, high = extremes(rows)
        batch = ObservedBatch(rows, low, high, tensor=x)
        for observer in observers:
            observer.expect(tuple(x.shape))
            method = RANGE_METHODS[observer.spec.method]
            if isinstance(observer._memory, PooledMemory):
                histogram = Histogram.of(at_least_float32(rows), low, high)
                self._statistics.append(_of_histogram([observer], histogram))
            elif method.reads == "values":
                self._find_range(observer, batch)
            elif method.reads == "extremes" or len(rows) <= ROWS_TO_DELAY:
                self._add_batch([observer], batch, SAMPLE_SIZE)
            else:
                # So many histograms would take too much memory
                observer.observe(x)

    def _find_range(self, observer: Observer, batch: ObservedBatch) -> None:
        """Find the range of a batch by a method that reads its values."""
        spec = observer.spec
        if not RANGE_METHODS[spec.method].device_ready:
            assert batch.tensor is not None
            observer.observe(batch.tensor)
            return
        rows_at_once = len(batch.rows) if spec.has_searched_scale else ROWS_AT_ONCE
        ranges = [ranges_of(part, spec) for part in batch.split(rows_at_once)]
        ends = [torch.cat(parts) for parts in zip(*ranges, strict=True)]
        take = partial(_take_ranges, [observer])
        self._statistics.append(_Statistics([observer], batch.low, batch.high, ends, take))

    def _keep(self, read: _Read) -> None:
        """Keep what was read until there are others like it, but not too much."""
        self._reads.setdefault(read.kind(), []).append(read)
        self._kept += read.sample.numel()
        if self._kept > _MOST_VALUES:
            self._count()

    def _count(self) -> None:
        """Turn what was kept into statistics."""
        for reads in self._reads.values():
            self._add_reads(reads)
        self._reads.clear()
        self._kept = 0

    def _add_reads(self, reads: Sequence[_Read]) -> None:
        """Add the statistics of tensors that have been read and are of one kind."""
        lows = torch.stack([read.low for read in reads])
        highs = torch.stack([read.high for read in reads])
        low, high = lows.amin(1), highs.amax(1)
        observers = [read.observer for read in reads if read.observer is not None]
        if not observers:
            unobserved = [None] * len(reads)
            self._statistics.append(_Statistics(unobserved, low, high, (), _take_nothing))
            return
        samples = torch.stack([read.sample for read in reads])
        if isinstance(observers[0]._memory, RangeMemory):
            self._add_batch(observers, ObservedBatch(samples, low, high), samples.numel())
            return
        weight = reads[0].weight
        outermost = None
        if weight != 1:
            # The sample may leave out the outermost values, which matter most
            outermost = at_least_float32(torch.cat([lows, highs], 1))
        histogram = Histogram.of(samples, low, high, weight=weight, extra=outermost)
        self._statistics.append(_of_histogram(observers, histogram))

    def _add_batch(
        self, observers: Sequence[Observer], batch: ObservedBatch, limit: int
    ) -> None:
        """Add the statistics of observers of one spec that keep the range of each batch, for as
        many rows of a batch each. At most `limit` values are counted.
        """
        spec = observers[0].spec
        if RANGE_METHODS[spec.method].reads == "extremes":
            take = partial(_take_extremes, observers, spec)
            self._statistics.append(_Statistics(observers, batch.low, batch.high, (), take))
            return
        kind = spec, len(batch.low) // len(observers), batch.low.device
        self._counted.setdefault(kind, []).append((observers, batch.counted(limit)))


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, with one copy from each device.

    >>> [tensor.tolist() for tensor in copied([torch.tensor([1.5]), torch.tensor([[2], [3]])])]
    [[1.5], [[2], [3]]]
    """
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    copies = list(tensors)
    for device, own in places.items():
        if device.type == "cpu":
            continue
        # A view of bytes begins at a multiple of its size if the largest sizes come first
        own.sort(key=lambda place: -tensors[place].element_size())
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for place in own:
            by_dtype.setdefault(tensors[place].dtype, []).append(tensors[place].reshape(-1))
        own.sort(key=lambda place: [*by_dtype].index(tensors[place].dtype))
        joined = [torch.cat(parts).view(torch.uint8) for parts in by_dtype.values()]
        data = torch.cat(joined).cpu()
        sizes = [tensors[place].nbytes for place in own]
        for place, part in zip(own, torch.split(data, sizes), strict=True):
            tensor = tensors[place]
            copies[place] = part.view(tensor.dtype).view(tensor.shape)
    return copies


def _copy(values: Tensor) -> Tensor:
    """Return values as a row of at least float32 that shares no memory with them."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    row = values.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return row.view(-1)


def _of_counts(parts: Sequence[_Counted]) -> _Statistics:
    """Return the statistics of observers of one spec, from the histograms of their batches."""
    observers: list[Observer] = []
    for own, _ in parts:
        observers += own
    counted = CountedBatches.stacked([batch for _, batch in parts])
    spec = observers[0].spec
    others: Sequence[Tensor] = [counted.counts]
    take: Callable[..., None] = partial(_take_counts, observers)
    if RANGE_METHODS[spec.method].device_ready:
        others, take = ranges_of(counted, spec), partial(_take_ranges, observers)
    return _Statistics(observers, counted.low, counted.high, others, take)


def _of_histogram(observers: Sequence[Observer], histogram: Histogram) -> _Statistics:
    """Return the statistics of observers that keep one histogram of all batches."""
    others = histogram.counts, histogram.exponent
    take = partial(_take_histogram, observers)
    return _Statistics(observers, histogram.low, histogram.high, others, take)


def _take_nothing(low: Tensor, high: Tensor) -> None:
    """The values only had to be finite."""


def _take_extremes(
    observers: Sequence[Observer], spec: QuantizationSpec, low: Tensor, high: Tensor
) -> None:
    """Let observers take the ranges that follow from extremes."""
    ends = ranges_of(CountedBatches(low, high, low), spec)
    _take_ranges(observers, low, high, *ends)


def _take_counts(
    observers: Sequence[Observer], low: Tensor, high: Tensor, counts: Tensor
) -> None:
    """Let observers take histograms, of which `find_ranges` finds the ranges."""
    _take_ranges(observers, low, high, low, high)
    count = len(observers)
    parts = [tensor.tensor_split(count) for tensor in (low, high, counts)]
    for observer, *part in zip(observers, *parts, strict=True):
        assert isinstance(observer._memory, RangeMemory)
        observer._memory._pending = CountedBatches(*part)


def _take_ranges(
    observers: Sequence[Observer], low: Tensor, high: Tensor, *ends: Tensor
) -> None:
    """Let observers take the extremes of a batch, and the ends of its range."""
    compute_pending_ranges(observer._memory for observer in observers)
    values = torch.stack([tensor.double() for tensor in (*ends, low, high)])
    for observer, own in zip(observers, values.tensor_split(len(observers), 1), strict=True):
        memory = observer._memory
        assert isinstance(memory, RangeMemory)
        if memory._count == len(memory._buffer):
            memory._grow(own.shape[1])
        memory._buffer[memory._count] = own
        memory._count += 1


def _take_histogram(
    observers: Sequence[Observer], low: Tensor, high: Tensor, counts: Tensor, exponent: Tensor
) -> None:
    """Let observers take the histogram of a batch, and merge that of the batch before."""
    memories = [each._memory for each in observers if isinstance(each._memory, PooledMemory)]
    parts = [(each._pool, each._last) for each in memories]
    pools = [pool for pool, last in parts if pool is not None and last is not None]
    lasts = [last for pool, last in parts if pool is not None and last is not None]
    if len(pools) == len(memories):
        # One merge of all takes a fraction of the time
        merged = _joined(pools).merge(_joined(lasts))
        for memory, pool in zip(memories, _split(merged, len(memories)), strict=True):
            memory._pool, memory._last = pool, None
    new = Histogram(counts, exponent, low, high)
    for memory, last in zip(memories, _split(new, len(memories)), strict=True):
        memory._append(last, 1)


def _joined(histograms: Sequence[Histogram]) -> Histogram:
    """Return all their rows, one below the other."""
    columns = zip(*(vars(each).values() for each in histograms), strict=True)
    return Histogram(*(torch.cat(column) for column in columns))


def _split(histogram: Histogram, count: int) -> list[Histogram]:
    """Return the histograms of as many rows each."""
    columns = [tensor.tensor_split(count) for tensor in vars(histogram).values()]
    return [Histogram(*row) for row in zip(*columns, strict=True)]
