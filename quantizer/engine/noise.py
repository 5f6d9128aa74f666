"""What a tensor loses to its approximation, added up over batches. Knows no networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from quantizer.numerics.metrics import decibel, energy


@dataclass
class Noise:
    """Running energies over batches of a tensor x and its approximation y: |x|^2, |y|^2 and |x - y|^2."""

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
        return (self.signal + self.other - self.error) / 2 / norm if norm else float(self.signal == self.other)
