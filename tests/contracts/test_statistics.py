"""What every statistic over batches promises."""

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.observers.methods import BATCH_STATISTICS, reduce_batches

values = st.lists(st.floats(2.0**-100, 2.0**100), min_size=1, max_size=20)


@pytest.mark.parametrize("name", BATCH_STATISTICS)
@given(values=values, data=st.data())
@settings(derandomize=True, max_examples=50, deadline=None)
def test_lies_within_the_batches_and_ignores_their_order(name, values, data):
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    shuffled = torch.tensor(data.draw(st.permutations(values)), dtype=torch.float64)[:, None]
    result = reduce_batches(column, name)
    assert torch.equal(result, reduce_batches(shuffled, name))
    assert min(values) * (1 - 1e-15) <= result.item() <= max(values) * (1 + 1e-15)


@pytest.mark.parametrize("name", BATCH_STATISTICS)
def test_reduces_every_column_by_itself(name):
    columns = torch.tensor([[1.0, 8.0], [2.0, 8.0], [2.0, 8.0]])
    reduced = reduce_batches(columns, name)
    assert reduced[0] == reduce_batches(columns[:, :1], name)
    assert reduced[1] == 8


# pytorch_nndct 3.5 gives these for the scales of four batches.
@pytest.mark.parametrize(
    ("name", "expected"), [("max", 0.4), ("mean", 0.225), ("median", 0.2), ("modal", 0.2)]
)
def test_the_values_of_vai_q_pytorch(name, expected):
    scales = torch.tensor([[0.1], [0.2], [0.2], [0.4]], dtype=torch.float64)
    assert reduce_batches(scales, name).item() == pytest.approx(expected, rel=1e-12)


def test_equally_frequent_scales_give_the_coarser_one():
    assert reduce_batches(torch.tensor([[0.25], [0.5], [0.25], [0.5]]), "modal").item() == 0.5


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(ValueError, match='did you mean "median"'):
        reduce_batches(torch.ones(2, 1), "medial")
