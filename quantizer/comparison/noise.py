"""What a tensor loses to its approximation, added up over batches. Knows no networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quantizer.numerics.blocks import flattened
from quantizer.numerics.metrics import decibel, energy

GAP = 32
"""Values that are so many times smaller than the largest have lost five bits to it."""
SAMPLE = 8192
"""So many values are looked at before all are."""


@dataclass
class Noise:
    """Running energies over batches of a tensor x and its approximation y: |x|^2, |y|^2 and |x
    - y|^2.
    """

    signal: float = 0.0
    other: float = 0.0
    error: float = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch."""
        self.signal += energy(x)
        self.other += energy(y)
        self.error += energy(x - y)

    def merge(self, other: Noise) -> None:
        """Take in other batches."""
        self.signal += other.signal
        self.other += other.other
        self.error += other.error

    @property
    def sqnr_db(self) -> float:
        """10 log10(|x|^2 / |x - y|^2): infinite when they are equal."""
        return decibel(self.signal, self.error)

    @property
    def cosine(self) -> float:
        """x.y / (|x| |y|), with x.y = (|x|^2 + |y|^2 - |x - y|^2) / 2; 1 when both are zero."""
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        if not math.isfinite(norm):
            return math.nan
        return (
            (self.signal + self.other - self.error) / 2 / norm
            if norm
            else float(self.signal == self.other)
        )


def beside_far_values(x: Tensor) -> Tensor | None:
    """Return which values of `x` are not far ones, if a gap lies between these and far ones;
    None if there is none.

    Far values, as sentinels are, set the range and have nearly all energy, so that they hide
    what the others lose.

    >>> import torch
    >>> beside_far_values(torch.tensor([0.5, -1.0, 1e4]))
    tensor([ True,  True, False])
    >>> beside_far_values(torch.tensor([0.5, -1.0, 1.5])) is None
    True
    """
    if x.numel() == 0:
        return None
    middle = float(max(abs(end) for end in x.aminmax())) / 2
    if not _is_apart(flattened(x)[:: -(-x.numel() // SAMPLE)], middle):
        return None
    return x.abs() < middle if _is_apart(x, middle) else None


def _is_apart(x: Tensor, middle: float) -> bool:
    """Whether values below the middle of the range of magnitudes are not all zero, and far
    below.
    """
    magnitudes = x.abs()
    least = magnitudes[magnitudes < middle]
    return least.numel() > 0 and 0 < float(least.max()) < 2 * middle / GAP
