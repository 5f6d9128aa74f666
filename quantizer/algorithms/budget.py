"""Chooses one option for each item under a budget, at the least total error. Knows neither
layers nor bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STATES = 1 << 15
"""Partial choices kept at once. As long as they suffice, which they do where sizes repeat, the
choice is the best.
"""


@dataclass(frozen=True)
class Option:
    """What one choice for an item costs: a size in any whole unit, and an error that adds up
    over items.
    """

    size: int
    error: float


def choose(items: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """For each item the index of its option, so that sizes sum up to `budget` at most and the
    errors to the least.

    The multiple-choice knapsack problem by dynamic programming over undominated partial
    choices. Of more than `STATES` of them a sample is kept: then the result is no worse than
    any choice of the same index for all items, and still within the budget.

    Returns:
        None where even the smallest options are too large.

    Source: Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", section 11.5.

    >>> choose([[Option(2, 9.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 1.0)]], 6)
    (1, 0)
    """
    least = [min(option.size for option in options) for options in items]
    left = budget - sum(least)
    if left < 0:
        return None
    sizes, errors = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    origins: list[tuple[Tensor, Tensor]] = []
    for options, smallest in zip(items, least, strict=True):
        extra = torch.tensor([option.size - smallest for option in options])
        added = torch.tensor([option.error for option in options], dtype=torch.float64)
        reached, total = (sizes[:, None] + extra).flatten(), (errors[:, None] + added).flatten()
        kept = _undominated(reached, total, left)
        origins.append((kept // len(options), kept % len(options)))
        sizes, errors = reached[kept], total[kept]
    state = len(sizes) - 1  # the largest, and so the one with the least error
    picked: list[int] = []
    for before, chosen in reversed(origins):
        picked.append(int(chosen[state]))
        state = int(before[state])
    return _no_worse_than_alike(items, budget, tuple(reversed(picked)))


def _undominated(sizes: Tensor, errors: Tensor, left: int) -> Tensor:
    """Which states to keep, smallest first: those that fit and have less error than all that
    are not larger.
    """
    order = torch.argsort(errors, stable=True)
    order = order[torch.argsort(sizes[order], stable=True)]
    order = order[sizes[order] <= left]
    best = torch.cummin(errors[order], 0).values
    is_new = torch.ones(len(order), dtype=torch.bool)
    is_new[1:] = best[1:] < best[:-1]
    order = order[is_new]
    if len(order) <= STATES:
        return order
    bucket = sizes[order] * STATES // (left + 1)
    # Of its bucket, that is the one with the least error
    is_last = torch.ones(len(order), dtype=torch.bool)
    is_last[:-1] = bucket[1:] != bucket[:-1]
    is_last[0] = True  # from the smallest one every item can be added
    return order[is_last]


def _no_worse_than_alike(
    items: Sequence[Sequence[Option]], budget: int, picked: tuple[int, ...]
) -> tuple[int, ...]:
    """The choice, or the same index for all items where that fits and is better."""

    def total(indices: Sequence[int]) -> tuple[float, int]:
        taken = [options[index] for options, index in zip(items, indices, strict=True)]
        return sum(option.error for option in taken), sum(option.size for option in taken)

    counts = {len(options) for options in items}
    alike = [(index,) * len(items) for index in range(counts.pop())] if len(counts) == 1 else []
    return min((picked, *(each for each in alike if total(each)[1] <= budget)), key=total)
