"""States how fast a file runs against the same network in float, if measured times allow it.

Measures nothing itself: it is given the times of rounds in which both have run in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

LEAST_ROUNDS = 3
"""Rounds below which there is no spread to judge by."""
WIDEST = 1.25
"""The largest ratio of upper to lower quartile: beyond it another run would give another
speed.
"""
PLAUSIBLE = 20.0
"""The largest speed-up that kernels can give: beyond it, something else has slowed float
down.
"""
SLOW = 0.1
"""The share of float's speed below which it is said how many times slower a file is."""
BUSY = "the machine is too busy to tell the speed against float"


@dataclass(frozen=True)
class Speed:
    """The speed of a file as a multiple of that of the network in float.

    Args:
        ratio: the median over rounds of float's time over the file's.
        low: the lower quartile of these ratios.
        high: the upper one.
        rounds: how many there were.
    """

    ratio: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, ours: Sequence[float], floats: Sequence[float]) -> Speed | None:
        """Return what the times of rounds say, or None if there are too few.

        Args:
            ours: seconds of the file, one for each round.
            floats: seconds of the network in float, in the same rounds.

        >>> Speed.of([1.0, 1.0, 1.0], [1.5, 2.0, 2.5])
        Speed(ratio=2.0, low=1.75, high=2.25, rounds=3)
        """
        pairs = zip(ours, floats, strict=True)
        ratios = [its / mine for mine, its in pairs if mine > 0 and its > 0]
        if len(ratios) < LEAST_ROUNDS:
            return None
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return cls(median(ratios), low, high, len(ratios))

    @property
    def is_clear(self) -> bool:
        """Return whether rounds agree well enough to state a speed."""
        return self.high <= WIDEST * self.low and self.ratio < PLAUSIBLE

    @property
    def text(self) -> str:
        """Return the speed with its spread, or that it cannot be told.

        >>> Speed(1.8, 1.75, 1.86, 7).text
        '1.8x the speed of float (1.8 to 1.9 in 7 rounds)'
        >>> Speed(0.04, 0.0399, 0.0401, 7).text
        '25 times slower than float (24.9 to 25.1 in 7 rounds)'
        >>> Speed(1.8, 0.9, 3.1, 7).text
        'the machine is too busy to tell the speed against float'
        """
        if not self.is_clear:
            return BUSY
        if self.ratio < SLOW:
            times, least, most = 1 / self.ratio, 1 / self.high, 1 / self.low
            spread = f"{least:.1f} to {most:.1f} in {self.rounds} rounds"
            return f"{times:.0f} times slower than float ({spread})"
        digits = 1 if self.ratio >= 1 else 2
        spread = f"{self.low:.{digits}f} to {self.high:.{digits}f}"
        return f"{self.ratio:.{digits}f}x the speed of float ({spread} in {self.rounds} rounds)"
