"""The mean and the standard deviation of values, over batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 3e-6
"""A standard deviation below this share of the values is float32's own rounding."""


@dataclass(frozen=True)
class Moments:
    """Sums over batches, of all values or of each channel.

    Args:
        count: how many values there are, of each channel.
        mean: float64, () or [channels].
        squares: the sum of squared distances from the mean, float64.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, axes: Sequence[int]) -> Moments:
        """Return the moments of one batch, whose values are along these axes. Without axes,
        each value is alone.
        """
        values = x.float()
        if not axes:
            # torch takes no axes for all of them
            values = values.unsqueeze(0)
            axes = [0]
        variance, mean = torch.var_mean(values, list(axes), correction=0)
        channels = max(1, mean.numel())
        count = x.numel() // channels
        rows = torch.stack((mean, variance * count))
        mean, squares = rows.cpu().double()
        return cls(count, mean, squares)

    def merged(self, other: Moments) -> Moments:
        """Return the moments over both batches.

        Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", 1979, equation 1.5.

        >>> x = torch.tensor([1.0, 2.0, 6.0])
        >>> both = Moments.of(x[:1], [0]).merged(Moments.of(x[1:], [0]))
        >>> float(both.mean), float(both.squares)
        (3.0, 14.0)
        """
        count = self.count + other.count
        share = other.count / max(1, count)
        distance = other.mean - self.mean
        mean = self.mean + distance * share
        between = distance.square() * self.count * share
        squares = self.squares + other.squares + between
        return Moments(count, mean, squares)

    @property
    def deviation(self) -> Tensor:
        """Return the standard deviation."""
        count = max(1, self.count)
        variance = self.squares / count
        return variance.sqrt()

    @property
    def is_varying(self) -> Tensor:
        """Return whether the values differ by more than float's own rounding.

        >>> x = torch.tensor([[2.0, 2.0], [2.0 + 5e-7, 2.1]])
        >>> Moments.of(x, [0]).is_varying.tolist()
        [False, True]
        """
        size = self.mean.abs()
        return self.deviation > _ROUNDING * size
