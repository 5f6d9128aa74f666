"""Finds the cheapest way to divide things into two sides, as a minimum cut."""

from __future__ import annotations

import math
from collections import deque

# Of the sum of all finite costs. What is left below it is an error of rounding.
_NOTHING = 1e-12
_FIRST = "\0first"
_SECOND = "\0second"
_Capacity = dict[str, dict[str, float]]
"""What fits through from one name to another."""


class TwoSides:
    """Divides names into a first and a second side, so that the costs are as small as possible.

    The names' order does not matter. If two ways cost the same, the first side is the smaller
    one.

    >>> sides = TwoSides()
    >>> sides.cost("a", on_first=1, on_second=5)
    >>> sides.cost("b", on_first=3, on_second=2)
    >>> sides.part_cost("a", "b", 4)
    >>> sorted(sides.first_side())
    ['a', 'b']
    """

    def __init__(self) -> None:
        self._capacity: _Capacity = {}
        self._total = 0.0

    def cost(
        self,
        name: str,
        *,
        on_first: float,
        on_second: float,
    ) -> None:
        """Add what a name costs on each side."""
        self.part_cost(_FIRST, name, on_second)
        self.part_cost(name, _SECOND, on_first)

    def part_cost(
        self,
        first: str,
        second: str,
        cost: float,
    ) -> None:
        """Add what it costs if one name is on the first side, and another on the second."""
        ends = self._ends(first, second)
        ends[second] += cost
        self._total += cost

    def forbid(
        self,
        first: str,
        second: str,
    ) -> None:
        """Refuse that one name is on the first side, and another on the second."""
        ends = self._ends(first, second)
        ends[second] = math.inf

    def _ends(
        self,
        start: str,
        end: str,
    ) -> dict[str, float]:
        """Return what fits through from a name, after an entry is made for both directions."""
        ends = self._capacity.setdefault(start, {})
        ends.setdefault(end, 0.0)
        back = self._capacity.setdefault(end, {})
        back.setdefault(start, 0.0)
        return ends

    def first_side(self) -> set[str]:
        """Return the names on the first side."""
        residual: _Capacity = {}
        for name in sorted(self._capacity):
            ends = self._capacity[name]
            residual[name] = dict(sorted(ends.items()))
        smallest = _NOTHING * self._total
        sources = _reached(residual, smallest)
        while _SECOND in sources:
            _send(residual, sources)
            sources = _reached(residual, smallest)
        return sources.keys() - {_FIRST}


def _reached(
    residual: _Capacity,
    smallest: float,
) -> dict[str, str]:
    """Return the names that a flow reaches from the first side, and where it comes from."""
    sources = {_FIRST: ""}
    waiting = deque([_FIRST])
    while waiting:
        name = waiting.popleft()
        ends = residual.get(name, {})
        for end, capacity in ends.items():
            if capacity > smallest and end not in sources:
                sources[end] = name
                waiting.append(end)
    return sources


def _send(
    residual: _Capacity,
    sources: dict[str, str],
) -> None:
    """Send as much as fits along the way to the second side."""
    steps: list[tuple[str, str]] = []
    amount = math.inf
    end = _SECOND
    while end != _FIRST:
        start = sources[end]
        steps.append((start, end))
        amount = min(amount, residual[start][end])
        end = start
    for start, end in steps:
        residual[start][end] -= amount
        residual[end][start] += amount
