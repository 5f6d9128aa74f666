"""Errors of outputs that are estimated from some rows, beside those of all rows."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantizer.layerwise.round_to_nearest import estimated_error, output_error

SEEDS, STRIDES = st.integers(0, 1000), st.integers(1, 9)


@given(SEEDS, STRIDES)
def test_inputs_of_one_direction_leave_nothing_to_estimate(seed: int, stride: int) -> None:
    """However the rows differ, and where only rows that are not looked at lose anything."""
    draw = torch.Generator().manual_seed(seed)
    x, rows = torch.randn(2, 8, 1, generator=draw), torch.randn(2, 40, 8, generator=draw)
    rows *= torch.randn(40, 1, generator=draw).mul_(3).exp_()
    gram = x @ x.mT
    assert estimated_error(gram, rows, stride) == pytest.approx(
        output_error(gram, rows), rel=1e-3
    )


@given(SEEDS)
def test_every_row_gives_the_error_itself(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, rows = torch.randn(2, 30, 8, generator=draw), torch.randn(2, 5, 8, generator=draw)
    gram = x.mT @ x
    assert estimated_error(gram, rows, 1) == pytest.approx(output_error(gram, rows), rel=1e-5)


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_inputs_with_a_large_mean(stride: int) -> None:
    """What some rows alone say is off by more: of a few rows that follow the mean, all or none
    are looked at.
    """
    draw = torch.Generator().manual_seed(0)
    x, rows = (
        torch.randn(1, 4096, 64, generator=draw) + 3,
        torch.randn(1, 1024, 64, generator=draw),
    )
    rows[:, 1::128] += 3
    gram = x.mT @ x
    exact = output_error(gram, rows)
    alone = output_error(gram, rows[:, ::stride]) * stride
    assert (
        abs(estimated_error(gram, rows, stride) / exact - 1)
        < 0.02
        < 0.3
        < abs(alone / exact - 1)
    )


def test_inputs_that_are_zero_make_no_error() -> None:
    assert estimated_error(torch.zeros(1, 4, 4), torch.ones(1, 6, 4), 2) == 0.0
