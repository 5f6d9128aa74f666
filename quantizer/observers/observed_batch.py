"""What a range method may read, of one batch or of all together: exact extremes, a histogram.
Finds no range.

A tensor is a matrix here: one row, or one row per channel or group. Everything but the extremes
is read from a regular sample of at most 2^17 values of all rows together, or 2^12 of each if
that is more; smaller tensors are read whole. The sample's stride has no divisor in common with
the row's length, so it cannot run along one column of an image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quantizer.numerics.blocks import BLOCK, flattened, memory_order
from quantizer.numerics.granularity import to_rows
from quantizer.numerics.histogram import BINS, Histogram

SAMPLE = 1 << 17
SLICE = 1 << 13  # values of one index of the first axis, where all batches are counted together
SAMPLE_PER_ROW = 1 << 12
NARROW = 16
ALONE = 1 << 17  # values of a row that are read by themselves, by all threads
# Values per step where nothing is written, so that as much again stays in the cache
READ = 2 * BLOCK

Range = tuple[Tensor, Tensor]

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def as_rows(
    x: Tensor,
    qscheme: str = "per_tensor",
    ch_axis: int | None = None,
    group_size: int | None = None,
    scales_per_group: int = 1,
) -> Tensor:
    """Return `x` as a matrix of one row per scale, in memory order if there is one scale; a
    view where memory allows.

    >>> as_rows(torch.zeros(4, 3, 5, 5), "per_channel", 1).shape
    torch.Size([3, 100])
    """
    if qscheme != "per_tensor" or group_size is not None:
        return to_rows(x, qscheme, ch_axis, group_size, scales_per_group)
    return flattened(x).unsqueeze(0)


def extremes(rows: Tensor) -> Range:
    """Return the least and the greatest value of each row, in its dtype; of a row with NaN at
    least the least is NaN.

    Long rows are read by `aminmax`, one by one. Along a dimension two reductions of a block in
    the cache are many times faster. Values that are not negative come in the order of their
    bits: those are compared, read as integers, three times as fast again, as none of them is
    NaN (one whose sign is set may go unseen). Rows without such a value are read once more.
    """
    count, length = rows.shape
    if count == 1 or (rows.is_cpu and length >= ALONE):
        lows, highs = zip(*(row.aminmax() for row in rows), strict=True)
        return torch.stack(lows), torch.stack(highs)
    # Torch reduces narrow dtypes slowly
    wide = rows.dtype if rows.dtype in _BITS else torch.float32
    parts = (
        [rows] if rows.numel() <= READ else torch.split(rows, max(1, READ // max(1, length)))
    )
    low, bits = _joined(_least_and_bits(part.to(wide)) for part in parts)
    high = (
        bits.view(wide)
        if count and int(bits.min()) >= 0
        else torch.cat([part.to(wide).amax(1) for part in parts])
    )
    return low.to(rows.dtype), high.to(rows.dtype)


def _least_and_bits(rows: Tensor) -> Range:
    """The least value of each row, and the greatest of those that their bits are, read as
    integers.
    """
    greatest = _narrowed(rows, torch.maximum).view(_BITS[rows.dtype])
    return _narrowed(rows, torch.minimum).amin(1), greatest.amax(1)


def _joined(ranges: Iterable[Range]) -> Range:
    """Those of parts as one."""
    least, greatest = zip(*ranges, strict=True)
    return (
        (least[0], greatest[0]) if len(least) == 1 else (torch.cat(least), torch.cat(greatest))
    )


def _narrowed(rows: Tensor, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Rows too narrow for torch's fast reduction are folded by its fast elementwise
    operators.
    """
    while rows.shape[1] <= NARROW and rows.shape[1] % 2 == 0:
        half = rows.shape[1] // 2
        rows = pick(rows[:, :half], rows[:, half:])
    return rows


def stride_for(length: int, limit: int) -> int:
    """Return the smallest step that leaves at most `limit` of `length` values and shares no
    divisor with `length`.

    >>> stride_for(1000, 1000), stride_for(112 * 112, 1000)
    (1, 13)
    """
    stride = -(-length // limit)
    while math.gcd(stride, length) > 1:
        stride += 1
    return stride


def is_sampled(x: Tensor) -> bool:
    """Whether `slices` leaves out values of `x`."""
    return x.ndim > 1 and x[0].numel() > SLICE


def by_index(x: Tensor) -> Tensor:
    """Return `x` as one row for each index of its first axis, in memory order; a view where
    memory allows.
    """
    return x.permute(0, *(axis + 1 for axis in memory_order(x[0]))).reshape(len(x), -1)


def slices(x: Tensor) -> tuple[Tensor, int]:
    """Return `x` as one row that is the same however its first axis was cut into batches, up to
    the order.

    Of each index of that axis it has at most SLICE values, as far apart in memory; the number
    tells how many values of `x` each stands for.

    >>> row, stride = slices(torch.zeros(10, 64, 112, 112))
    >>> row.shape, stride
    (torch.Size([1, 81100]), 99)
    """
    if not is_sampled(x):
        return as_rows(x), 1
    inside = by_index(x)
    stride = stride_for(inside.shape[1], SLICE)
    return inside[:, ::stride].reshape(1, -1), stride


class Distribution(ABC):
    """Values in rows, as far as range methods read them: the extremes `low` and `high` (R,),
    and counts in bins.
    """

    low: Tensor
    high: Tensor

    @property
    @abstractmethod
    def histogram(self) -> Tensor:
        """Counts in 2 * BINS bins around 0, (R, 2 * BINS) float64 on the CPU."""

    @property
    @abstractmethod
    def width(self) -> Tensor:
        """The width of a bin, (R,) float64."""

    @cached_property
    def amax(self) -> Tensor:
        """The largest magnitude of each row, (R,) float64."""
        return torch.maximum(-self.low, self.high).double()

    @cached_property
    def magnitudes(self) -> Tensor:
        """Counts of magnitudes in BINS bins from 0, (R, BINS) float64 on the CPU."""
        return self.histogram[:, BINS:] + self.histogram[:, :BINS].flip(1)

    def clipped(self, clip: Tensor) -> Range:
        """Return the range cut to magnitudes of at most `clip` (R,)."""
        return torch.maximum(self.low, -clip), torch.minimum(self.high, clip)


@dataclass(frozen=True)
class PooledBatches(Distribution):
    """The values of all batches, in one histogram."""

    pool: Histogram

    @property
    def low(self) -> Tensor:  # type: ignore[override]
        """The least value of each row, (R,) float64."""
        return self.pool.low

    @property
    def high(self) -> Tensor:  # type: ignore[override]
        """The greatest value of each row, (R,) float64."""
        return self.pool.high

    @cached_property
    def histogram(self) -> Tensor:
        """As above."""
        return self.pool.counts.double()

    @property
    def width(self) -> Tensor:
        """As above."""
        return self.pool.width


@dataclass(frozen=True)
class CountedBatches(Distribution):
    """What is left of the rows of batches, of one tensor or of several, once they are counted:
    `counts` (R, 2 * BINS).

    `low` and `high` are (R,).
    """

    low: Tensor
    high: Tensor
    counts: Tensor

    @classmethod
    def stacked(cls, batches: Sequence[CountedBatches]) -> CountedBatches:
        """Return all their rows, one below the other."""
        fields = zip(*((each.low, each.high, each.counts) for each in batches), strict=True)
        return cls(*map(torch.cat, fields))

    @cached_property
    def histogram(self) -> Tensor:
        """As above."""
        return self.counts.double()

    @property
    def width(self) -> Tensor:
        """As above: the bins cover [-amax, amax]."""
        return self.amax / BINS


@dataclass(frozen=True)
class ObservedBatch(Distribution):
    """One batch's values as `rows` (R, N), with the exact extremes `low` and `high` (R,), in
    its dtype, on the CPU.

    `outermost` (1, 2 * B) are those of each of B samples, where `slices` leaves out values.
    """

    rows: Tensor
    low: Tensor
    high: Tensor
    outermost: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, *cut: Any) -> ObservedBatch:
        """Read a tensor once; NaN and infinity show in the extremes."""
        rows = as_rows(x, *cut)
        if len(rows) > 1 or not is_sampled(x):
            return cls(rows, *(end.cpu() for end in extremes(rows)))
        low, high = (end.cpu() for end in extremes(by_index(x)))
        return cls(rows, low.amin()[None], high.amax()[None], torch.cat([low, high])[None])

    @property
    def width(self) -> Tensor:
        """As for counted ones."""
        return self.amax / BINS

    @cached_property
    def histogram(self) -> Tensor:
        """Counts of the sample."""
        return self.counted().histogram

    def split(self, rows: int) -> list[ObservedBatch]:
        """Return the batch in parts of about equal height, each of at most `rows` rows."""
        count = -(-len(self.rows) // rows)
        if count == 1:
            return [self]
        parts = (part.tensor_split(count) for part in (self.rows, self.low, self.high))
        return [ObservedBatch(*part) for part in zip(*parts, strict=True)]

    def sample(self, limit: int = SAMPLE) -> Tensor:
        """Return at most `limit` values, or SAMPLE_PER_ROW of each row, (R, n) as float32, or
        float64 if they are.
        """
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        per_row = max(limit // len(self.rows), SAMPLE_PER_ROW)
        return self.rows[:, :: stride_for(self.rows.shape[1], per_row)].to(dtype).contiguous()

    def counted(self) -> CountedBatches:
        """Return the counts of the sample over [-amax, amax] in 2 * BINS equal bins, of each
        row int64 on the CPU.
        """
        sample, count, width = self.sample(), len(self.rows), 2 * BINS
        amax = torch.where(self.amax == 0, 1.0, self.amax).to(sample)
        index = (
            (sample / amax[:, None]).mul_(BINS).add_(BINS).clamp_(0, width - 1).to(torch.int32)
        )
        if count > 1:
            index += torch.arange(
                0, count * width, width, dtype=torch.int32, device=index.device
            )[:, None]
        counts = torch.bincount(index.view(-1), minlength=count * width).view(count, width)
        return CountedBatches(self.low, self.high, counts.cpu())
