"""The values that range methods read: exact extremes and a histogram, of one batch or of all.

A tensor is a matrix here, with one row, or one row per channel or group. Histograms are those
of a sample: of every n-th value, at most 2^17 of all rows together, or 2^12 of each row if that
is more. Smaller tensors are read whole. The stride n has no divisor in common with the length
of a row. So a sample does not consist of one column of an image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantizer.numerics.blocks import flatten_memory, memory_order
from quantizer.numerics.granularity import Cut, to_rows
from quantizer.numerics.histogram import BINS, Histogram, count_bins

SAMPLE_SIZE = 1 << 17
"""How many values a sample has at most."""
SAMPLE_PER_ROW = 1 << 12
"""How many values of each row a sample may have in any case."""
SLICE_SIZE = 1 << 13
"""How many values a histogram of all batches counts for each index of the first axis, at
most.
"""

_LONG_ROW = 1 << 17
"""Rows of at least this length are read one by one, each by all threads."""

LowHigh = tuple[Tensor, Tensor]


def as_rows(x: Tensor, cut: Cut = ("per_tensor", None, None, 1)) -> Tensor:
    """Return `x` as a matrix with one row per scale. A single row is in memory order.

    It is a view if the layout in memory allows that.

    >>> as_rows(torch.zeros(4, 3, 5, 5), ("per_channel", 1, None, 1)).shape
    torch.Size([3, 100])
    """
    qscheme, _, group_size, _ = cut
    if qscheme == "per_tensor" and group_size is None:
        return flatten_memory(x).unsqueeze(0)
    return to_rows(x, cut)


def extremes(rows: Tensor) -> LowHigh:
    """Return the least and the greatest value of each row, in its dtype.

    If a row has NaN, so have both. On a CPU, `aminmax` is fast for whole tensors, and so for
    long rows one by one.
    """
    if not rows.is_cpu:
        # Nothing waits there, and one call is faster than several
        low, high = rows.aminmax(dim=1)
        return low, high
    if len(rows) == 1 or rows.shape[1] >= _LONG_ROW:
        lows, highs = zip(*(row.aminmax() for row in rows), strict=True)
        return torch.stack(lows), torch.stack(highs)
    return rows.amin(1), rows.amax(1)


def stride_for(length: int, limit: int) -> int:
    """Return the smallest stride that takes at most `limit` of `length` values and has no
    divisor in common with `length`.

    >>> stride_for(1000, 1000), stride_for(112 * 112, 1000)
    (1, 13)
    """
    stride = -(-length // limit)
    while math.gcd(stride, length) > 1:
        stride += 1
    return stride


def is_sampled(x: Tensor) -> bool:
    """Return whether `slices` leaves out values of `x`."""
    return x.ndim > 1 and x[0].numel() > SLICE_SIZE


def by_index(x: Tensor) -> Tensor:
    """Return `x` as one row for each index of its first axis, in memory order.

    It is a view if the layout in memory allows that.
    """
    inner_axes = [axis + 1 for axis in memory_order(x[0])]
    return x.permute(0, *inner_axes).reshape(len(x), -1)


def largest_by_index(x: Tensor) -> Tensor:
    """Return the largest magnitude at each index of the first axis, float64.

    >>> largest_by_index(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))
    tensor([3., 2.], dtype=torch.float64)
    """
    low, high = extremes(by_index(x))
    return torch.maximum(-low, high).double()


def slices(x: Tensor) -> tuple[Tensor, int]:
    """Return a sample of `x` as one row, and how many values of `x` each value stands for.

    The row has at most SLICE_SIZE values for each index of the first axis, evenly spaced in
    memory. So the same values are sampled, however samples are divided into batches.

    >>> row, stride = slices(torch.zeros(10, 64, 112, 112))
    >>> row.shape, stride
    (torch.Size([1, 81100]), 99)
    """
    if not is_sampled(x):
        return as_rows(x), 1
    samples = by_index(x)
    stride = stride_for(samples.shape[1], SLICE_SIZE)
    return samples[:, ::stride].reshape(1, -1), stride


class ObservedValues(ABC):
    """Values in R rows, as range methods read them: the extremes `low` and `high` (R,), and a
    histogram. They are on the CPU, or on the device of the values for a method whose row says
    that it is `device_ready`.
    """

    low: Tensor
    high: Tensor

    @property
    @abstractmethod
    def histogram(self) -> Tensor:
        """Return counts in bins around 0, (R, 2 * BINS) float64, where `low` is."""

    @property
    def width(self) -> Tensor:
        """Return the width of a bin, (R,) float64: the bins cover [-amax, amax]."""
        return self.amax / BINS

    @cached_property
    def amax(self) -> Tensor:
        """Return the largest magnitude of each row, (R,) float64."""
        return torch.maximum(-self.low, self.high).double()

    @cached_property
    def magnitudes(self) -> Tensor:
        """Return counts of magnitudes in bins from 0, (R, BINS) float64."""
        return self.histogram[:, BINS:] + self.histogram[:, :BINS].flip(1)

    def clipped(self, clip: Tensor) -> LowHigh:
        """Return the range clipped to magnitudes of at most `clip` (R,)."""
        return torch.maximum(self.low, -clip), torch.minimum(self.high, clip)


class PooledBatches(ObservedValues):
    """The values of all batches, in one histogram."""

    def __init__(self, pool: Histogram) -> None:
        self.low = pool.low
        self.high = pool.high
        self._pool = pool

    @cached_property
    def histogram(self) -> Tensor:
        """Return the counts of the pool."""
        return self._pool.counts.double()

    @property
    def width(self) -> Tensor:
        """Return the width of a bin of the pool, (R,) float64."""
        return self._pool.width


@dataclass(frozen=True)
class CountedBatches(ObservedValues):
    """The extremes and the histogram `counts` (R, 2 * BINS) of rows, without their values.

    The rows may be those of several batches or tensors.
    """

    low: Tensor
    high: Tensor
    counts: Tensor

    @classmethod
    def stacked(cls, batches: Sequence[CountedBatches]) -> CountedBatches:
        """Return all their rows, one below the other."""
        return cls(
            torch.cat([batch.low for batch in batches]),
            torch.cat([batch.high for batch in batches]),
            torch.cat([batch.counts for batch in batches]),
        )

    @cached_property
    def histogram(self) -> Tensor:
        """Return `counts` as float64."""
        return self.counts.double()


@dataclass(frozen=True)
class ObservedBatch(ObservedValues):
    """The values of one batch, with their exact extremes.

    Attributes:
        rows: (R, N) the values.
        low, high: (R,) the extremes of each row, in the same dtype.
        outermost: (1, 2 * B) the extremes of each index of the first axis, if `slices` leaves
            out values; otherwise None.
        tensor: the values in their own shape; None in a part of a batch whose rows are no
            indices of the first axis.
    """

    rows: Tensor
    low: Tensor
    high: Tensor
    outermost: Tensor | None = None
    tensor: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, cut: Cut = ("per_tensor", None, None, 1)) -> ObservedBatch:
        """Read a tensor once. If it has NaN or infinity, so have the extremes."""
        rows = as_rows(x, cut)
        if len(rows) > 1 or not is_sampled(x):
            low, high = extremes(rows)
            return cls(rows, low.cpu(), high.cpu(), tensor=x)
        low, high = extremes(by_index(x))
        outermost = torch.cat([low, high]).cpu()[None]
        return cls(rows, low.amin().cpu()[None], high.amax().cpu()[None], outermost, x)

    @cached_property
    def histogram(self) -> Tensor:
        """Return the counts of the sample."""
        return self.counted().histogram

    def split(self, rows: int) -> list[ObservedBatch]:
        """Return the batch in parts of about equal height, each of at most `rows` rows."""
        count = -(-len(self.rows) // rows)
        if count == 1:
            return [self]
        tensors: Sequence[Tensor | None] = [None] * count
        if self.tensor is not None and len(self.tensor) == len(self.rows):
            tensors = self.tensor.tensor_split(count)
        parts = zip(
            self.rows.tensor_split(count),
            self.low.tensor_split(count),
            self.high.tensor_split(count),
            tensors,
            strict=True,
        )
        return [ObservedBatch(*part[:3], tensor=part[3]) for part in parts]

    def sample(self, limit: int = SAMPLE_SIZE) -> Tensor:
        """Return every n-th value of each row, (R, n), as float32 or float64.

        There are at most `limit` values, or SAMPLE_PER_ROW of each row if that is more.
        """
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        per_row = max(limit // len(self.rows), SAMPLE_PER_ROW)
        stride = stride_for(self.rows.shape[1], per_row)
        return self.rows[:, ::stride].to(dtype).contiguous()

    def counted(self, limit: int = SAMPLE_SIZE) -> CountedBatches:
        """Return the histogram of each row's sample of at most `limit` values: 2 * BINS equal
        bins over [-amax, amax], as int64 where the extremes are.
        """
        sample = self.sample(limit)
        amax = torch.where(self.amax == 0, 1.0, self.amax).to(sample)
        position = (sample / amax[:, None]).mul_(BINS).add_(BINS)
        counts = count_bins(position.clamp_(0, 2 * BINS - 1).to(torch.int32))
        return CountedBatches(self.low, self.high, counts.to(self.low.device))
