"""Finds the cheapest way to divide names into two sides, as a minimum cut.

The names are the vertices of a network. A cost is the capacity of an edge: it is paid if the
edge begins on the first side and ends on the second. The cheapest division cuts what a maximum
flow from the first side to the second fills.

Source: Edmonds and Karp, "Theoretical improvements in algorithmic efficiency for network flow
problems", 1972.
"""

import math
from collections import deque

# A smaller share of the sum of all finite costs is an error of rounding
_TOLERANCE = 1e-12
# Names that are on their sides in every division
_FIRST = "\0first"
_SECOND = "\0second"
_Capacities = dict[str, dict[str, float]]
"""How much more can flow along each edge, by its start and its end."""


class TwoSides:
    """Divides names into a first and a second side, so that the sum of costs is the smallest.

    The order of the calls does not matter. Of equally cheap divisions, the result is the one
    with the smallest first side. Costs are not negative and have any unit.

    Alone, "b" is cheaper on the second side. But "a" belongs on the first side, and dividing
    the two costs more than "b" saves:

    >>> sides = TwoSides()
    >>> sides.cost("a", on_first=1, on_second=5)
    >>> sides.cost("b", on_first=3, on_second=2)
    >>> sides.cost_apart("a", "b", 4)
    >>> sorted(sides.first_side())
    ['a', 'b']
    """

    def __init__(self) -> None:
        self._capacities: _Capacities = {}
        self._total = 0.0

    def cost(self, name: str, *, on_first: float, on_second: float) -> None:
        """Add what a name costs on each side."""
        # A name on the second side is apart from `_FIRST`, which is always on the first
        self.cost_apart(_FIRST, name, on_second)
        self.cost_apart(name, _SECOND, on_first)

    def cost_apart(self, first: str, second: str, cost: float) -> None:
        """Add what it costs if `first` is on the first side and `second` on the second.

        The other way round, they cost nothing.
        """
        capacities = self._capacities_from(first, second)
        capacities[second] += cost
        self._total += cost

    def forbid(self, first: str, second: str) -> None:
        """Refuse that `first` is on the first side and `second` on the second."""
        capacities = self._capacities_from(first, second)
        capacities[second] = math.inf

    def _capacities_from(self, start: str, end: str) -> dict[str, float]:
        """Return the capacities of the edges that begin at `start`, by their ends.

        The edge to `end` and the one back are among the edges afterwards.
        """
        capacities = self._capacities.setdefault(start, {})
        capacities.setdefault(end, 0.0)
        # A later path may take back flow, against the direction of the edge
        back = self._capacities.setdefault(end, {})
        back.setdefault(start, 0.0)
        return capacities

    def first_side(self) -> set[str]:
        """Return the names on the first side."""
        residual: _Capacities = {}
        # Sorted, so that the flow does not depend on the order of the calls
        for name in sorted(self._capacities):
            capacities = self._capacities[name]
            residual[name] = dict(sorted(capacities.items()))
        tolerance = _TOLERANCE * self._total
        predecessors = _reached(residual, tolerance)
        while _SECOND in predecessors:
            _send(residual, predecessors)
            predecessors = _reached(residual, tolerance)
        return predecessors.keys() - {_FIRST}


def _reached(residual: _Capacities, tolerance: float) -> dict[str, str]:
    """Return the names that more flow can reach from `_FIRST`, each with the name before it on
    a shortest path.
    """
    predecessors = {_FIRST: ""}
    waiting = deque([_FIRST])
    while waiting:
        name = waiting.popleft()
        capacities = residual.get(name, {})
        for end, capacity in capacities.items():
            if capacity > tolerance and end not in predecessors:
                predecessors[end] = name
                waiting.append(end)
    return predecessors


def _send(residual: _Capacities, predecessors: dict[str, str]) -> None:
    """Send as much flow as fits along the path to `_SECOND`, and update what is left."""
    edges: list[tuple[str, str]] = []
    amount = math.inf
    end = _SECOND
    while end != _FIRST:
        start = predecessors[end]
        edges.append((start, end))
        amount = min(amount, residual[start][end])
        end = start
    for start, end in edges:
        residual[start][end] -= amount
        residual[end][start] += amount
