"""Cases of parametrized tests that `make test-extended` runs and `make test` does not.

Such a case reaches no line or branch, and no kind of value, that a case of `make test` does not
reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def extended(*values: Any) -> list[Any]:
    """Mark these values of a parametrized test; a tuple has a value for each parameter."""
    cases: list[Any] = []
    for value in values:
        parameters = value if isinstance(value, tuple) else (value,)
        cases.append(pytest.param(*parameters, marks=pytest.mark.extended))
    return cases


def extended_except(values: Iterable[Any], *usual: Any) -> list[Any]:
    """Mark all values but the usual ones, which `make test` runs."""
    listed = list(values)
    missing = [value for value in usual if value not in listed]
    assert usual, "`make test` runs at least one case of each test"
    assert not missing, f"no cases of this test: {missing}"
    cases: list[Any] = []
    for value in listed:
        if value in usual:
            parameters = value if isinstance(value, tuple) else (value,)
            cases.append(pytest.param(*parameters))
        else:
            cases += extended(value)
    return cases


def one_of_each(groups: Iterable[Sequence[Any]]) -> list[Any]:
    """Mark all values of each group but one: the first of the first group, the second of the
    next, and so on.
    """
    cases: list[Any] = []
    for number, group in enumerate(groups):
        usual = number % len(group)
        for place, value in enumerate(group):
            cases += [value] if place == usual else extended(value)
    return cases
