"""Shifts with rounding are those of exact fractions; the pooling factors are those of the
DPU.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.integer import pooling_factor, requantize, wrap_int32

HALF = Fraction(1, 2)
EXACT = {
    "half_up": lambda x: math.floor(x + HALF),
    "half_down": lambda x: math.ceil(x - HALF) if x > 0 else math.floor(x + HALF),
    "half_even": round,
    "std_round": lambda x: math.floor(x + HALF) if x > 0 else math.ceil(x - HALF),
}


@pytest.mark.parametrize("mode", EXACT)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(code=st.integers(-(2**31), 2**31 - 1), shift=st.integers(-4, 24))
def test_a_shift_rounds_as_fractions_do(mode: str, code: int, shift: int) -> None:
    expected = EXACT[mode](Fraction(code) / Fraction(2) ** shift)
    found = requantize(
        torch.tensor([float(code)], dtype=torch.float64), shift, -128, 127, round_mode=mode
    )
    assert found.tolist() == [max(-128, min(127, expected))]


@given(code=st.integers(-(2**40), 2**40))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_int32_wraps_as_a_register_does(code: int) -> None:
    expected = (code + 2**31) % 2**32 - 2**31
    assert wrap_int32(torch.tensor([code], dtype=torch.float64)).tolist() == [expected]


# Measured on pytorch_nndct 3.5 (Vitis AI): what its average pooling multiplies the mean by.
PUBLISHED = {
    (3, 3): 63 / 64,
    (5, 5): 250 / 256,
    (6, 6): 252 / 256,
    (3, 6): 252 / 256,
    (6, 3): 252 / 256,
    (7, 7): 1029 / 1024,
    (14, 14): 4116 / 4096,
    (2, 2): 1.0,
    (4, 4): 1.0,
    (8, 8): 1.0,
    (9, 9): 0.9986572265625,
    (10, 10): 1.0009765625,
    (1, 7): 0.998046875,
    (12, 12): 1.001953125,
}


@pytest.mark.parametrize("window", PUBLISHED)
def test_pooling_factors_are_those_of_the_dpu(window: tuple[int, int]) -> None:
    multiplier, shift = pooling_factor(*window)
    assert multiplier * math.prod(window) / 2**shift == PUBLISHED[window]


def test_no_pooling_factor_is_far_from_the_mean() -> None:
    errors = [
        abs(m * h * w / 2**s - 1)
        for h in range(1, 40)
        for w in range(1, 40)
        for m, s in [pooling_factor(h, w)]
    ]
    assert max(errors) == abs(250 / 256 - 1)
