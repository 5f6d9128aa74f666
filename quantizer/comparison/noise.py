"""Measures the error of an approximation of a tensor, summed over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quantizer.numerics.blocks import flatten_memory
from quantizer.numerics.metrics import Approximation, Energies, decibel, noise_energies

_GAP = 32
"""Far values are so many times larger than the others, which takes five bits from these."""
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


def beside_far_values(x: Tensor) -> Tensor | None:
    """Return a mask of the values that are not far from zero, if a gap is between them and
    far values; None if there is no gap.

    Far values, such as sentinels, have nearly all the energy, so that they hide the error of
    the others.

    >>> import torch
    >>> beside_far_values(torch.tensor([0.5, -1.0, 1e4]))
    tensor([ True,  True, False])
    >>> beside_far_values(torch.tensor([0.5, -1.0, 1.5])) is None
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
