"""The least and greatest value of each row, which are compared as integers where that is the
same.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.model import QuantizationSpec
from quantizer.observers import NonFiniteError, Observer
from quantizer.observers.observed_batch import extremes

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.floats(-65504, 65504, width=16), min_size=6, max_size=6),
        min_size=2,
        max_size=5,
    )
)
def test_they_are_those_of_torch_in_every_dtype(dtype, values):
    rows = torch.tensor(values, dtype=dtype)
    low, high = extremes(rows)
    assert low.dtype == high.dtype == dtype
    assert torch.equal(low, rows.amin(1))
    assert torch.equal(high, rows.amax(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_positive_value_have_their_own_maximum(dtype):
    rows = torch.tensor([[-3.0, -1.0, -2.0], [-0.0, -4.0, -1.0], [1.0, -5.0, 0.5]], dtype=dtype)
    assert extremes(rows)[1].tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "broken", [math.nan, -math.nan, math.inf, -math.inf], ids=["nan", "-nan", "inf", "-inf"]
)
def test_what_is_not_finite_is_seen_whatever_its_sign(dtype, broken):
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2, 7] = broken
    if math.isnan(broken):
        x[2, 7] = torch.tensor(math.nan, dtype=dtype).copysign(
            torch.tensor(broken, dtype=dtype)
        )
    with pytest.raises(NonFiniteError):
        Observer(QuantizationSpec(qscheme="per_channel", ch_axis=0)).observe(x)
