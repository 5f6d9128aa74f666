"""Benchmarks that time functions by their names find these functions."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
from support.runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from bench_end_to_end import CLOCKS

_FUNCTIONS = {clock[:2] for clocks in CLOCKS.values() for clock in clocks}


@pytest.mark.parametrize(("place", "name"), sorted(_FUNCTIONS))
def test_a_timed_function_exists(place: str, name: str) -> None:
    assert callable(getattr(import_module(place), name))
