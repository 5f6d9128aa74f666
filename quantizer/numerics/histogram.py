"""A histogram that depends on the values alone: bins a power of two wide, merged exactly. It
knows no range method.

A value x falls into bin trunc(|x| / 2^e) of its sign, where 2^e is the least width with which
`BINS` of them hold the largest magnitude seen. Bins twice as wide are pairs of bins, to the
last value. So any order of the values, any cut into batches and any merging give the same
histogram. It keeps 2 * BINS counts of 8 bytes for each row, 32 kB. Its width is 1/2048 to
1/1024 of the largest magnitude, which is how far an edge read from it may be off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Per sign; the resolution of TensorRT's and pytorch_nndct's calibrators
BINS = 2048
# 2^126 times any value that needs so fine a bin is finite in float32
LEAST_EXPONENT = -126
_LOG2_BINS = BINS.bit_length() - 1
# On a device, rows of at least so many values are counted one by one, in the fast memory of a
# processor. There values of the same bin, such as the zeros of a ReLU, wait less for each other
_LONG_ROW = 1 << 12
# Counts in float32 are exact up to here
_EXACT = 1 << 24
_SIGN_BITS = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


@dataclass(frozen=True)
class Histogram:
    """The counts of rows of values, (R, 2 * BINS) int64, the negative ones first, from the
    largest magnitude on.

    `exponent` (R,) int32 is that of each row's bin width; `low` and `high` (R,) float64 are the
    exact extremes.
    """

    counts: Tensor
    exponent: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(
        cls,
        values: Tensor,
        low: Tensor,
        high: Tensor,
        *,
        weight: int = 1,
        extra: Tensor | None = None,
    ) -> Histogram:
        """Count each of `values` (R, N), float32 or float64 and finite, `weight` times, and
        each of `extra` (R, M) once. `low` and `high` (R,) enclose them.

        >>> values = torch.tensor([[-1.0, 0.5, 3.0]])
        >>> histogram = Histogram.of(values, torch.tensor([-1.0]), torch.tensor([3.0]))
        >>> histogram.width.item(), histogram.counts.nonzero()[:, 1].tolist()
        (0.001953125, [1535, 2304, 3584])
        """
        low = low.double()
        high = high.double()
        amax = torch.maximum(-low, high)
        exponent = (torch.frexp(amax).exponent - _LOG2_BINS).clamp_(min=LEAST_EXPONENT)
        exponent = torch.where(amax == 0, LEAST_EXPONENT, exponent).to(torch.int32)
        # A power of two, from the bits of float64: the product is exact
        scale = ((1023 - exponent.long()) << 52).view(torch.float64)
        counts = _counts(values, scale)
        if weight != 1:
            counts.mul_(weight)
        if extra is not None:
            counts.add_(_counts(extra, scale))
        return cls(counts.to(low.device), exponent, low, high)

    @property
    def width(self) -> Tensor:
        """Return the width of a bin, (R,) float64."""
        return torch.ldexp(torch.ones(len(self.exponent), dtype=torch.float64), self.exponent)

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both.

        Raises:
            ValueError: they have different numbers of rows.
        """
        if self.counts.shape != other.counts.shape:
            raise ValueError(
                f"A histogram of {len(self.counts)} rows cannot take in one of "
                f"{len(other.counts)}."
            )
        exponent = torch.maximum(self.exponent, other.exponent)
        counts = self._counts_at(exponent) + other._counts_at(exponent)
        low = torch.minimum(self.low, other.low)
        high = torch.maximum(self.high, other.high)
        return Histogram(counts, exponent, low, high)

    def scaled(self, factor: float) -> Histogram:
        """Return the histogram of the values times a power of two."""
        exponent = self.exponent + int(math.log2(factor))
        return Histogram(self.counts, exponent, self.low * factor, self.high * factor)

    def _counts_at(self, exponent: Tensor) -> Tensor:
        """Return the counts in bins of 2^exponent (R,), which are not narrower."""
        halvings = (exponent - self.exponent).clamp(max=_LOG2_BINS)
        counts = self.counts
        for halving in sorted(set(halvings.tolist()) - {0}):
            rows = halvings == halving
            merged = counts[rows].view(-1, (2 * BINS) >> halving, 1 << halving).sum(2)
            outside = BINS - (BINS >> halving)
            padded = torch.nn.functional.pad(merged, (outside, outside))
            counts = counts.index_put((rows,), padded)
        return counts

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `from_tensors` takes, by name."""
        # Rows of several histograms may share memory, which is not to be stored with each
        return {name: tensor.clone() for name, tensor in vars(self).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Histogram:
        """Return the histogram that `to_tensors` stored.

        Raises:
            ValueError: the tensors are something else.
        """
        counts = tensors.get("counts", torch.empty(0))
        row = (counts.shape[0] if counts.ndim else 0,)
        expected = {"counts": (*row, 2 * BINS), "exponent": row, "low": row, "high": row}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(
                f"A histogram's tensors are counts (R, {2 * BINS}), exponent, low, high (R,), "
                f"not {listed}."
            )
        if bool((counts.sum(1) <= 0).any()):
            raise ValueError("A histogram has a row without values.")
        return cls(**tensors)


def _counts(values: Tensor, scale: Tensor) -> Tensor:
    """Return how many of each row of values (R, N), times its scale (R,), fall into each bin,
    (R, 2 * BINS) int64.
    """
    integers, sign_shift = _SIGN_BITS[values.dtype]
    index = values.mul(scale.to(values)[:, None]).to(torch.int32)
    # The sign bit adds -1. It is that of the value, as the product may be as small as -0.0
    index += (values.view(integers) >> sign_shift).to(torch.int32)
    index += BINS
    return count_bins(index)


def count_bins(index: Tensor) -> Tensor:
    """Return how many times each row (R, N) int32 has each bin, (R, 2 * BINS) int64. It may
    overwrite the rows.

    >>> count_bins(torch.tensor([[7, 7]], dtype=torch.int32))[0, 6:9].tolist()
    [0, 2, 0]
    """
    if not index.is_cpu:
        return _count_on_device(index)
    rows = len(index)
    bins = rows * 2 * BINS
    # One bincount for all rows: each row has its own bins
    if rows > 1:
        index += torch.arange(0, bins, 2 * BINS, dtype=torch.int32)[:, None]
    return torch.bincount(index.view(-1), minlength=bins).view(rows, 2 * BINS)


def _count_on_device(index: Tensor) -> Tensor:
    """Return the same on a device, where nothing may wait for the counts.

    `torch.bincount` would wait for the greatest index. An index that is no bin, as a value that
    is not finite may have, is counted anywhere or not at all.
    """
    rows, length = index.shape
    is_refused = torch.are_deterministic_algorithms_enabled()
    if _LONG_ROW <= length < _EXACT and not is_refused:
        counts = [torch.histc(row, 2 * BINS, 0, 2 * BINS) for row in index.float().unbind()]
        return torch.stack(counts).long()
    inside = index.clamp(0, 2 * BINS - 1).long()
    zeros = torch.zeros(rows, 2 * BINS, dtype=torch.int64, device=index.device)
    return zeros.scatter_add_(1, inside, torch.ones_like(inside))
