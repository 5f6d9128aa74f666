"""Which layers have to stay in float for a metric to hold, the fewest bytes first; found by
test runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantizer.config.roles import is_parameter
from quantizer.evaluation.ablation import Ablation
from quantizer.numerics.codes import bits_of
from quantizer.plan.model import Key, Plan

PRUNED = 12
"""Among so many layers, each is tried without, as one may have been in the way of those that
matter.
"""


@dataclass(frozen=True)
class Part:
    """Layers that are quantized together, what their tensors cost the output, and the bytes
    that they take in float.
    """

    layers: tuple[str, ...]
    noise: float
    cost: int


def parts(plan: Plan, found: Ablation) -> list[Part]:
    """All that can be left in float, those first that gain most for a byte of weights and of
    one sample's values.
    """
    owner = {
        name: name for key in plan.tensors for name in (key[0], *plan.tensors[key].members)
    }

    def root(name: str) -> str:
        while owner[name] != name:
            name = owner[name]
        return name

    for key, tensor in plan.tensors.items():
        if not is_parameter(key[1]):
            for name in tensor.members:
                owner[root(name)] = root(key[0])
    lost = math.fsum(found.noise)
    gains, costs, members = dict[str, float](), dict[str, int](), dict[str, list[str]]()
    for effect in found.effects:
        at = root(effect.key[0])
        gains[at] = gains.get(at, 0.0) + max(0.0, lost - math.fsum(effect.without))
        costs[at] = costs.get(at, 0) + _bytes(plan, effect.key)
    for name in owner:
        members.setdefault(root(name), []).append(name)
    order = plan.graph.index
    made = [
        Part(tuple(sorted(members[at], key=order.__getitem__)), gains[at], costs[at])
        for at in gains
    ]
    return sorted(made, key=lambda part: (-part.noise / max(1, part.cost), part.layers))


def cheapest(
    candidates: Sequence[Part], holds: Callable[[Sequence[Part]], bool]
) -> list[Part] | None:
    """The first few candidates with which the metric holds, and of these none that it holds
    without; None if it does not even with all.

    Args:
        candidates: as `parts` orders them.
        holds: a test run with these in float. It is called some log2(n) times, and once more
            for each of a few.
    """
    if holds([]):
        return []
    if not holds(candidates):
        return None
    low, high = 0, len(candidates)  # it does not hold with `low`, and holds with `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(candidates[:middle]) else (middle, high)
    chosen = list(candidates[:high])
    if len(chosen) <= PRUNED:
        for part in sorted(chosen[:-1], key=lambda part: -part.cost):
            without = [each for each in chosen if each is not part]
            if holds(without):
                chosen = without
    return chosen


def _bytes(plan: Plan, key: Key) -> int:
    """What a tensor takes more in float: a weight's values, an activation's of one sample."""
    if is_parameter(key[1]):
        values = plan.parameter(key).numel()
    else:
        node = plan.graph.by_name[plan.tensors[key].source]
        values = math.prod(size for size in (node.shape or ())[1:] if size is not None)
    return values * max(0, 32 - bits_of(plan.tensors[key].spec)) // 8
