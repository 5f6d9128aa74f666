"""Tensors cut into one row per scale and put together again."""

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.granularity import from_rows, scale_shape, to_rows

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
QSCHEMES = ["per_tensor", "per_channel", "per_group", "per_token", "per_block"]


@given(
    shape=shapes,
    qscheme=st.sampled_from(QSCHEMES),
    group=st.sampled_from([None, -1, 1, 2, 3, 5]),
    data=st.data(),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_rows_come_back_and_are_as_many_as_scales(shape, qscheme, group, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    if qscheme in ("per_tensor", "per_channel") and group is not None:
        is_stack = (
            group > 0
            and shape[0] % group == 0
            and (qscheme == "per_tensor" or axis % len(shape) > 0)
        )
        group = group if is_stack else None  # a stack of tensors holds each of them whole
    if qscheme == "per_block":
        shape = (*shape, 4)
        group = max(group or 1, 1)
    x = torch.rand(shape) + 1
    rows = to_rows(x, (qscheme, axis, group, 1))
    assert rows.ndim == 2
    assert len(rows) == torch.Size(scale_shape(shape, (qscheme, axis, group, 1))).numel()
    # What fills up a last group is 0
    assert rows.sum().item() == pytest.approx(x.sum().item(), rel=1e-5)
    assert torch.equal(from_rows(rows, shape, (qscheme, axis, group, 1)), x)
    assert torch.equal(rows, to_rows(x, (qscheme, axis % len(shape), group, 1)))


def test_a_row_is_what_its_scale_is_for():
    """A weight [out, in] = [4, 6] in groups of 3 along the inputs, and along the outputs in
    groups of 2.
    """
    weight = torch.arange(24).view(4, 6)
    assert scale_shape((4, 6), ("per_group", 1, 3, 1)) == (4, 2)
    assert to_rows(weight, ("per_group", 1, 3, 1))[2 * 2 + 1].tolist() == weight[2, 3:].tolist()
    assert scale_shape((4, 6), ("per_group", 0, 2, 1)) == (6, 2)
    assert to_rows(weight, ("per_group", 0, 2, 1))[5 * 2 + 1].tolist() == weight[2:, 5].tolist()


def test_a_row_is_a_block_of_a_matrix():
    """A weight of 3 outputs and 5 inputs in blocks of 2: the last ones are filled up."""
    weight = torch.arange(15).view(3, 5)
    cut = ("per_block", None, 2, 1)
    assert scale_shape((3, 5), cut) == (2, 3)
    assert [row.tolist() for row in to_rows(weight, cut)[[0, 2, 5]]] == [
        *([0, 1, 5, 6], [4, 0, 9, 0], [14, 0, 0, 0])
    ]
    kernel = weight.view(3, 5, 1, 1).expand(3, 5, 2, 2)
    assert scale_shape((3, 5, 2, 2), cut) == (2, 2, 2, 3)
    assert to_rows(kernel, cut)[2 * 6 + 5].tolist() == [14, 0, 0, 0]


def test_a_row_of_a_stack_is_one_channel_of_one_tensor():
    """The weight [in, out of a group] of two groups: outputs 0 to 2 read inputs 0 and 1, the
    others 2 and 3.
    """
    weight = torch.arange(4 * 3 * 5).view(4, 3, 5)
    assert scale_shape((4, 3, 5), ("per_channel", 1, 2, 1)) == (6,)
    rows = to_rows(weight, ("per_channel", 1, 2, 1))
    assert rows[4].tolist() == weight[2:, 1].flatten().tolist()
    assert rows[2].tolist() == weight[:2, 2].flatten().tolist()


def test_tokens_of_an_image_are_its_places():
    image = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert scale_shape((2, 3, 4, 5), ("per_token", 1, None, 1)) == (2, 4, 5)
    assert (
        to_rows(image, ("per_token", 1, None, 1))[1 * 20 + 2 * 5 + 3].tolist()
        == image[1, :, 2, 3].tolist()
    )


def test_rows_along_the_last_axis_share_memory():
    x = torch.zeros(3, 4, 8)
    for cut in (("per_token", -1, None), ("per_group", 2, 4), ("per_channel", 0, None)):
        assert to_rows(x, (*cut, 1)).data_ptr() == x.data_ptr()
