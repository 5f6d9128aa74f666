"""Choices under a budget against all choices there are."""

from __future__ import annotations

import itertools
import math
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.evaluation import width_choice
from quantizer.evaluation.width_choice import Option, choose

sizes = st.integers(0, 40)
errors = st.floats(0, 1e6, allow_nan=False)
options = st.lists(st.builds(Option, sizes, errors), min_size=1, max_size=4)
instances = st.lists(options, min_size=1, max_size=5)
alike = st.integers(1, 4).flatmap(
    lambda count: st.lists(
        st.lists(st.builds(Option, sizes, errors), min_size=count, max_size=count), min_size=1
    )
)


def size_of(items: list[list[Option]], chosen: tuple[int, ...]) -> int:
    return sum(item[index].size for item, index in zip(items, chosen, strict=True))


def error_of(items: list[list[Option]], chosen: tuple[int, ...]) -> float:
    return sum(item[index].error for item, index in zip(items, chosen, strict=True))


@given(instances, st.integers(0, 200))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_no_choice_within_the_budget_is_better(items: list[list[Option]], limit: int) -> None:
    every = itertools.product(*(range(len(item)) for item in items))
    fitting = [chosen for chosen in every if size_of(items, chosen) <= limit]
    found = choose(items, limit)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert size_of(items, found) <= limit
    assert math.isclose(
        error_of(items, found), min(error_of(items, each) for each in fitting), abs_tol=1e-9
    )


@given(alike, st.integers(0, 400))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_few_states_stay_within_the_budget_and_no_worse_than_one_choice_for_all(
    items: list[list[Option]], limit: int
) -> None:
    with patch.object(width_choice, "_MAX_STATES", 3):
        found = choose(items, limit)
    uniform = [(index,) * len(items) for index in range(len(items[0]))]
    fitting = [chosen for chosen in uniform if size_of(items, chosen) <= limit]
    assert (found is None) == (
        sum(min(option.size for option in item) for item in items) > limit
    )
    if found is not None:
        assert size_of(items, found) <= limit
        assert all(error_of(items, found) <= error_of(items, each) for each in fitting)


def layers(count: int) -> list[list[Option]]:
    """Layers of many different sizes in 2, 3, 4 and 8 bits, whose errors fall by 6 dB per
    bit.
    """
    found = []
    for at in range(count):
        weights = 4096 + 977 * (at * 7919 % 101)
        scale = (1 + at * 31 % 17) ** 3
        found.append([Option(weights * bits // 8, scale * 4.0**-bits) for bits in (2, 3, 4, 8)])
    return found


def test_where_states_are_a_sample_the_choice_is_close_to_the_best() -> None:
    items = layers(120)
    limit = size_of(items, (1,) * len(items))
    with patch.object(width_choice, "_MAX_STATES", 1 << 11):
        found = choose(items, limit)
    assert found is not None
    assert size_of(items, found) <= limit
    assert error_of(items, found) <= 1.01 * lower_bound(items, limit)


def lower_bound(items: list[list[Option]], limit: int) -> float:
    """What no choice within the budget can go below: the largest value of the Lagrangian dual
    over many multipliers.
    """
    prices = [10 ** (exponent / 50) for exponent in range(-600, 100)]
    return max(
        sum(min(option.error + price * option.size for option in item) for item in items)
        - price * limit
        for price in prices
    )


def test_two_runs_choose_the_same() -> None:
    items = layers(60)
    found = choose(items, size_of(items, (1,) * len(items)))
    assert found is not None
    assert found == choose(items, size_of(items, (1,) * len(items)))
