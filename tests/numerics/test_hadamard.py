"""Orthogonal matrices of any size, and those of Hadamard where there is one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantizer.nn.rare_layers import factors, odd_factor, rotate_rows


@given(st.integers(1, 200))
def test_matrices_of_any_size_are_orthogonal(channels: int) -> None:
    left, right = factors(channels)
    unit = torch.eye(channels, dtype=torch.float64)
    turned = rotate_rows(unit, torch.ones(channels, dtype=torch.float64), left, right)
    assert torch.allclose(turned @ turned.T, unit, atol=1e-12)
    # Hadamard: all entries have one size; else those of the Hartley transform, 1.42 times that.
    assert float(turned.abs().max()) * channels**0.5 <= 2**0.5 + 1e-9


@pytest.mark.parametrize("order", [12, 20, 44, 72, 108, 140, 152, 224])
def test_paley_matrices_are_hadamard(order: int) -> None:
    """Paley 1933: a prime order - 1 that is 3 modulo 4."""
    odd = order
    while odd % 2 == 0:
        odd //= 2
    matrix = odd_factor(odd, order // odd)
    assert len(matrix) == order
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, order**-0.5))
    assert torch.allclose(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-12)
