"""The mergeable histogram: a function of the values alone, whatever their order, parts and
merges.
"""

import itertools

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.histogram import BINS, LEAST_EXPONENT, Histogram

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUES = st.lists(
    FINITE | st.floats(-4, 4, width=32) | st.sampled_from([0.0, -0.0]), min_size=1, max_size=40
)


def counted(values, dtype=torch.float32):
    rows = torch.as_tensor(values, dtype=dtype).view(1, -1)
    return Histogram.of(rows, rows.amin(1), rows.amax(1))


def equal(one, other):
    return all(map(torch.equal, one.to_tensors().values(), other.to_tensors().values()))


@given(values=VALUES, data=st.data())
@settings(derandomize=True, max_examples=150, deadline=None)
def test_any_parts_merged_in_any_order_and_grouping_are_the_whole(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(1, len(values)), max_size=5)))
    ends = [0, *cuts, len(values)]
    parts = [
        counted(values[start:end]) for start, end in itertools.pairwise(ends) if start < end
    ]
    parts = data.draw(st.permutations(parts))
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [parts[at].merge(parts[at + 1])]
    assert equal(parts[0], counted(data.draw(st.permutations(values))))


@given(values=VALUES)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_it_counts_every_value_in_bins_next_to_it(values):
    found = counted(values)
    amax = max(map(abs, values))
    assert found.counts.sum() == len(values)
    assert found.width.item() <= max(amax / (BINS // 2), 2.0**LEAST_EXPONENT)
    assert amax < BINS * found.width.item()
    for value in values:
        index = int(abs(value) / found.width.item())
        negative = torch.tensor(value).signbit()
        assert found.counts[0, BINS - 1 - index if negative else BINS + index] > 0


@given(values=VALUES)
@settings(derandomize=True, max_examples=50, deadline=None)
def test_opposite_values_have_the_mirrored_histogram(values):
    assert torch.equal(
        counted(values).counts, counted([-value for value in values]).counts.flip(1)
    )


def test_rows_have_widths_of_their_own():
    rows = torch.tensor([[1.0, -2.0], [0.0, 0.0], [1e-30, 3e30]])
    first = Histogram.of(rows, rows.amin(1), rows.amax(1))
    other = rows.flip(1) * torch.tensor([[8.0], [1.0], [0.001]])
    both = first.merge(Histogram.of(other, other.amin(1), other.amax(1)))
    for row in range(3):
        assert torch.equal(
            both.counts[row], counted(torch.cat([rows[row], other[row]])).counts[0]
        )
    assert both.exponent.tolist() == [-6, LEAST_EXPONENT, 91]


@pytest.mark.parametrize("value", [1e300, -1e-300, 5e-324])
def test_float64_beyond_float32(value):
    found = counted([value, 1.0], torch.float64).merge(counted([2.0], torch.float64))
    assert equal(found, counted([2.0, value, 1.0], torch.float64))


def test_it_becomes_tensors_and_back():
    found = counted([1.0, 2.0, -5.0])
    assert equal(Histogram.from_tensors(found.to_tensors()), found)
    with pytest.raises(
        ValueError, match=r"counts \(R, 4096\), exponent, low, high \(R,\), not low \(1,\)"
    ):
        Histogram.from_tensors({"low": found.low})
    with pytest.raises(ValueError, match="1 rows cannot take in one of 2"):
        found.merge(Histogram.of(torch.ones(2, 3), torch.ones(2), torch.ones(2)))
