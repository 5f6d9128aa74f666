"""Sums over batches: the error of an approximation of a tensor, and the moments of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import flatten_memory
from quantizer.numerics.metrics import Approximation, Energies, decibel, noise_energies

_GAP = 32
"""Mask constants are so many times larger than the others, which takes five bits from these."""
_ROUNDING = 3e-6
"""A standard deviation below this share of the values is float32's own rounding."""
_SAMPLE = 8192
"""So many values are checked before all are."""


@dataclass
class Noise:
    """Sums over batches of energies of a tensor x and its approximation y.

    Args:
        signal: |x|^2.
        other: |y|^2.
        error: |x - y|^2.
    """

    signal: float = 0.0
    other: float = 0.0
    error: float = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add one batch of the tensor and its approximation."""
        signal, (energies,) = noise_energies(x, [Approximation(y)])
        self.add_energies(signal, energies)

    def add_energies(self, signal: float, energies: Energies) -> None:
        """Add the energies of one batch."""
        self.signal += signal
        self.other += energies.other
        self.error += energies.error

    def merge(self, other: Noise) -> None:
        """Add other batches."""
        self.signal += other.signal
        self.other += other.other
        self.error += other.error

    @property
    def sqnr_db(self) -> float:
        """Return 10 log10(|x|^2 / |x - y|^2) in dB; infinity if x and y are equal."""
        return decibel(self.signal, self.error)

    @property
    def cosine(self) -> float:
        """Return x.y / (|x| |y|), with x.y = (|x|^2 + |y|^2 - |x - y|^2) / 2.

        It is 1 if both are zero.
        """
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        if not math.isfinite(norm):
            return math.nan
        if not norm:
            return float(self.signal == self.other)
        product = (self.signal + self.other - self.error) / 2
        return product / norm


def beside_mask_constants(x: Tensor) -> Tensor | None:
    """Return which values are not mask constants, if there is a gap between the two; None
    if there is no gap.

    Mask constants have nearly all the energy, so that they hide the error of the others.

    >>> import torch
    >>> beside_mask_constants(torch.tensor([0.5, -1.0, 1e4]))
    tensor([ True,  True, False])
    >>> beside_mask_constants(torch.tensor([0.5, -1.0, 1.5])) is None
    True
    """
    if x.numel() == 0:
        return None
    # Torch copies what it reads in another order than that of memory
    flat = flatten_memory(x)
    middle = float(max(abs(end) for end in flat.aminmax())) / 2
    step = math.ceil(x.numel() / _SAMPLE)
    sample = flat[::step]
    if not _has_gap(sample, middle) or not _has_gap(x, middle):
        return None
    return x.abs() < middle


def _has_gap(x: Tensor, middle: float) -> bool:
    """Return whether the values below half of the largest magnitude are far below it, and not
    all zero.
    """
    magnitudes = x.abs()
    small = magnitudes[magnitudes < middle]
    if not small.numel():
        return False
    return 0 < float(small.max()) < 2 * middle / _GAP


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
