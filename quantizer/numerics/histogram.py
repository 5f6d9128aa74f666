"""A histogram that does not show how its values came: bins a power of two wide, merged exactly.
Knows no range method.

A value x falls into bin trunc(|x| / 2^e) of its sign, where 2^e is the least width for which
BINS bins hold the largest magnitude seen. Bins twice as wide are pairs of bins, to the last
value, so a histogram is a function of the values alone: in any order, in any parts, merged in
any way. It keeps 2 * BINS counts of 8 bytes for each row, 32 kB, and its width is 1/2048 to
1/1024 of the largest magnitude, which is how far an edge read from it may be off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 2048  # per sign; the resolution of TensorRT's and pytorch_nndct's calibrators
LEAST_EXPONENT = -126  # 2^126 times any value that needs so fine a bin is finite in float32
_BITS = {torch.float32: (torch.int32, 31), torch.float64: (torch.int64, 63)}


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
        beside: Tensor | None = None,
    ) -> Histogram:
        """Count each of `values` (R, N), float32 or float64 and finite, `weight` times, and
        each of those `beside` (R, M) once; `low` and `high` (R,) enclose them.

        >>> histogram = Histogram.of(
        ...     torch.tensor([[-1.0, 0.5, 3.0]]), torch.tensor([-1.0]), torch.tensor([3.0])
        ... )
        >>> histogram.width.item(), histogram.counts.nonzero()[:, 1].tolist()
        (0.001953125, [1535, 2304, 3584])
        """
        low, high = low.double(), high.double()
        amax = torch.maximum(-low, high)
        exponent = (torch.frexp(amax).exponent - (BINS.bit_length() - 1)).clamp_(
            min=LEAST_EXPONENT
        )
        exponent = torch.where(amax == 0, LEAST_EXPONENT, exponent).to(torch.int32)
        # A power of two: the product is exact
        scale = torch.ldexp(torch.ones_like(amax), -exponent)
        counts = _counts(values, scale)
        counts = counts if weight == 1 else counts.mul_(weight)
        counts = counts if beside is None else counts.add_(_counts(beside, scale))
        return cls(counts.cpu(), exponent, low, high)

    @property
    def width(self) -> Tensor:
        """The width of a bin, (R,) float64."""
        return torch.ldexp(torch.ones(len(self.exponent), dtype=torch.float64), self.exponent)

    def merge(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both.

        Raises:
            ValueError: they have another number of rows.
        """
        if self.counts.shape != other.counts.shape:
            raise ValueError(
                f"A histogram of {len(self.counts)} rows cannot take in one of "
                f"{len(other.counts)}."
            )
        exponent = torch.maximum(self.exponent, other.exponent)
        counts = self._counts_at(exponent) + other._counts_at(exponent)
        return Histogram(
            counts,
            exponent,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
        )

    def scaled(self, factor: float) -> Histogram:
        """Return the histogram of the values times a power of two.

        >>> histogram = Histogram.of(
        ...     torch.tensor([[-1.0, 3.0]]), torch.tensor([-1.0]), torch.tensor([3.0])
        ... )
        >>> (
        ...     histogram.scaled(0.5).low.item(),
        ...     histogram.scaled(0.5).width.item() / histogram.width.item(),
        ... )
        (-0.5, 0.5)
        """
        exponent = self.exponent + int(math.log2(factor))
        return Histogram(self.counts, exponent, self.low * factor, self.high * factor)

    def _counts_at(self, exponent: Tensor) -> Tensor:
        """The counts in bins of 2^exponent (R,), which are no narrower."""
        steps = (exponent - self.exponent).clamp(max=BINS.bit_length() - 1)
        counts = self.counts
        for step in sorted(set(steps.tolist())):
            if step:
                rows = steps == step
                wide = counts[rows].view(-1, (2 * BINS) >> step, 1 << step).sum(2)
                counts = counts.index_put(
                    (rows,), torch.nn.functional.pad(wide, (BINS - (BINS >> step),) * 2)
                )
        return counts

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all there is to keep."""
        return dict(vars(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Histogram:
        """Return the histogram that `to_tensors` gave these of.

        Raises:
            ValueError: they are something else.
        """
        names = ("counts", "exponent", "low", "high")
        rows = len(tensors["counts"]) if "counts" in tensors and tensors["counts"].ndim else 0
        wanted = {name: ((rows, 2 * BINS) if name == "counts" else (rows,)) for name in names}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != wanted:
            shapes = ", ".join(
                f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()
            )
            raise ValueError(
                f"A histogram's tensors are counts (R, {2 * BINS}), exponent, low, high (R,), "
                f"not {shapes}."
            )
        if bool((tensors["counts"].sum(1) <= 0).any()):
            raise ValueError("A histogram has a row without values.")
        return cls(**tensors)


def _counts(values: Tensor, scale: Tensor) -> Tensor:
    """How many of each row of values (R, N), times its scale (R,), fall into each bin, (R, 2 *
    BINS) int64.
    """
    rows, (integers, shift) = len(values), _BITS[values.dtype]
    index = values.mul(scale.to(values)[:, None]).to(torch.int32)
    # The sign alone: a product may be as small as -0.0
    index += (values.view(integers) >> shift).to(torch.int32)
    index += (
        BINS
        + torch.arange(0, rows * 2 * BINS, 2 * BINS, dtype=torch.int32, device=index.device)[
            :, None
        ]
    )
    return torch.bincount(index.view(-1), minlength=rows * 2 * BINS).view(rows, 2 * BINS)
