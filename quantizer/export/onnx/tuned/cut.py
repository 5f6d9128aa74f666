"""Finds the cheapest way to divide things into two sides, as a minimum cut."""

from __future__ import annotations

from collections import defaultdict, deque

# Of the sum of all finite costs. What is left below it is an error of rounding.
_NOTHING = 1e-12
_FIRST = "\0first"
_SECOND = "\0second"


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
        self._capacity: dict[str, dict[str, float]] = defaultdict(dict)
        self._total = 0.0

    def cost(self, name: str, *, on_first: float, on_second: float) -> None:
        """Add what a name costs on each side."""
        self._add(_FIRST, name, on_second)
        self._add(name, _SECOND, on_first)

    def part_cost(self, first: str, second: str, cost: float) -> None:
        """Add what it costs if one name is on the first side, and another on the second."""
        self._add(first, second, cost)

    def forbid(self, first: str, second: str) -> None:
        """Forbid that one name is on the first side, and another on the second."""
        self._capacity[first][second] = float("inf")
        self._capacity[second].setdefault(first, 0.0)

    def _add(self, start: str, end: str, cost: float) -> None:
        before = self._capacity[start].get(end, 0.0)
        self._capacity[start][end] = before + cost
        self._capacity[end].setdefault(start, 0.0)
        self._total += cost

    def first_side(self) -> set[str]:
        """Return the names on the first side."""
        residual = {name: dict(ends) for name, ends in sorted(self._capacity.items())}
        smallest = _NOTHING * self._total
        while True:
            reached = _reached(residual, smallest)
            if _SECOND not in reached:
                return set(reached) - {_FIRST}
            _push_along(reached, residual)


def _reached(residual: dict[str, dict[str, float]], smallest: float) -> dict[str, str]:
    """Return the names that a flow reaches from the first side, and where it comes from."""
    reached = {_FIRST: ""}
    waiting = deque([_FIRST])
    while waiting:
        name = waiting.popleft()
        for end, capacity in sorted(residual.get(name, {}).items()):
            if capacity > smallest and end not in reached:
                reached[end] = name
                waiting.append(end)
    return reached


def _push_along(reached: dict[str, str], residual: dict[str, dict[str, float]]) -> None:
    """Push as much as fits along the way to the second side."""
    steps: list[tuple[str, str]] = []
    end = _SECOND
    while end != _FIRST:
        steps.append((reached[end], end))
        end = reached[end]
    amount = min(residual[start][end] for start, end in steps)
    for start, end in steps:
        residual[start][end] -= amount
        residual[end][start] += amount
