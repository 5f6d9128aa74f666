"""Choose one option for each item under a budget, at the least total error. Knows neither
layers nor bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_STATES = 1 << 15
"""Partial choices kept at once. The result is the best as long as they suffice, which they do
where sizes repeat.
"""


@dataclass(frozen=True)
class Option:
    """Says what one choice for an item costs: a size in any whole unit, and an error. Both add
    up over items.
    """

    size: int
    error: float


def choose(items: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """Return the index of the chosen option of each item, with sizes that sum up to `budget` at
    most and the least sum of errors.

    This is the multiple-choice knapsack problem, solved by dynamic programming over undominated
    partial choices. If there are more than `_MAX_STATES`, a sample is kept. The result is then
    within the budget, and no worse than any choice of the same index for all items.

    Returns:
        None if even the smallest options are too large.

    Source: Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", section 11.5.

    >>> choose([[Option(2, 9.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 1.0)]], 6)
    (1, 0)
    """
    smallest = [min(option.size for option in options) for options in items]
    room = budget - sum(smallest)
    if room < 0:
        return None
    sizes = torch.zeros(1, dtype=torch.int64)
    errors = torch.zeros(1, dtype=torch.float64)
    steps: list[tuple[Tensor, Tensor]] = []
    for options, least in zip(items, smallest, strict=True):
        extra_sizes = torch.tensor([option.size - least for option in options])
        option_errors = torch.tensor([option.error for option in options], dtype=torch.float64)
        sizes = (sizes[:, None] + extra_sizes).flatten()
        errors = (errors[:, None] + option_errors).flatten()
        states = _undominated(sizes, errors, room)
        steps.append((states // len(options), states % len(options)))
        sizes = sizes[states]
        errors = errors[states]
    # The largest state has the least error
    state = len(sizes) - 1
    chosen: list[int] = []
    for previous_states, indices in reversed(steps):
        chosen.append(int(indices[state]))
        state = int(previous_states[state])
    return _no_worse_than_uniform(items, budget, tuple(reversed(chosen)))


def _undominated(sizes: Tensor, errors: Tensor, room: int) -> Tensor:
    """Return the states to keep, smallest first: those that fit and have less error than all
    that are not larger.
    """
    order = torch.argsort(errors, stable=True)
    order = order[torch.argsort(sizes[order], stable=True)]
    order = order[sizes[order] <= room]
    best = torch.cummin(errors[order], 0).values
    is_better = torch.ones(len(order), dtype=torch.bool)
    is_better[1:] = best[1:] < best[:-1]
    order = order[is_better]
    if len(order) <= _MAX_STATES:
        return order
    bucket = sizes[order] * _MAX_STATES // (room + 1)
    # The last state of a bucket has its least error
    is_last = torch.ones(len(order), dtype=torch.bool)
    is_last[:-1] = bucket[1:] != bucket[:-1]
    # Every item can be added to the smallest state
    is_last[0] = True
    return order[is_last]


def _no_worse_than_uniform(
    items: Sequence[Sequence[Option]], budget: int, chosen: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the choice, or the same index for all items if that fits and is better."""

    def cost(indices: Sequence[int]) -> tuple[float, int]:
        options = [of_item[index] for of_item, index in zip(items, indices, strict=True)]
        return sum(option.error for option in options), sum(option.size for option in options)

    best = chosen
    counts = {len(options) for options in items}
    if len(counts) == 1:
        for index in range(counts.pop()):
            uniform = (index,) * len(items)
            _, size = cost(uniform)
            if size <= budget and cost(uniform) < cost(best):
                best = uniform
    return best
