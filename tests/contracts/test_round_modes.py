"""What every rounding mode promises; a new one must bring its row of half-way cases."""

import math

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.rounding import NEAREST, ROUND_MODES

# Half-way cases of the rounding kernels of pytorch_nndct 3.5 (methods 2, 3, 6 and 8), observed
# by running them.
POINTS = [-2.5, -1.5, -0.7, -0.5, -0.3, 0.49999997, 0.5, 1.5, 2.5, 3.5]
HALF_WAY = {
    "half_up": [-2, -1, -1, 0, 0, 0, 1, 2, 3, 4],
    "std_round": [-3, -2, -1, -1, 0, 0, 1, 2, 3, 4],
    "half_down": [-2, -1, -1, 0, 0, 0, 0, 1, 2, 3],
    "half_even": [-2, -2, -1, 0, 0, 0, 0, 2, 2, 4],
    "floor": [-3, -2, -1, -1, -1, 0, 0, 1, 2, 3],  # of IEEE 754, roundTowardNegative
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_every_mode_has_its_half_way_cases():
    assert set(ROUND_MODES) == set(HALF_WAY)


@pytest.mark.parametrize("name", ROUND_MODES)
def test_half_way_cases(name):
    assert ROUND_MODES[name](torch.tensor(POINTS)).tolist() == HALF_WAY[name]


@pytest.mark.parametrize("name", ROUND_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_in_place_and_keeps_the_dtype(name, dtype):
    x = torch.tensor([0.75, -0.75], dtype=dtype)
    rounded = ROUND_MODES[name](x)
    assert rounded.data_ptr() == x.data_ptr()
    assert rounded.dtype == dtype
    assert x.tolist() == ([1, -1] if name in NEAREST else [0, -1])


@pytest.mark.parametrize("name", ROUND_MODES)
def test_integers_stay(name):
    integers = torch.cat(
        [
            torch.arange(-300, 301).float(),
            torch.tensor([2.0**23 + 1, -(2.0**23) - 1, 2.0**24, 2.0**125]),
        ]
    )
    assert torch.equal(ROUND_MODES[name](integers.clone()), integers)


@pytest.mark.parametrize("name", ROUND_MODES)
def test_not_a_number_stays(name):
    assert ROUND_MODES[name](torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("name", sorted(NEAREST))
def test_neighbours_of_half_way_points_go_to_the_nearest_integer(name):
    halves = torch.arange(-40, 40) + 0.5
    for toward, nearest in ((-math.inf, halves - 0.5), (math.inf, halves + 0.5)):
        beside = torch.nextafter(halves, torch.tensor(toward))
        assert torch.equal(ROUND_MODES[name](beside), nearest)


@pytest.mark.parametrize("integer", [-3, -1, 0, 1, 2, 4096])
def test_floor_takes_the_neighbours_of_an_integer_down(integer):
    x = torch.tensor(float(integer))
    below, above = (torch.nextafter(x, torch.tensor(end)) for end in (-math.inf, math.inf))
    assert [ROUND_MODES["floor"](end).item() for end in (below, x, above)] == [
        integer - 1,
        integer,
        integer,
    ]


@pytest.mark.parametrize("name", ROUND_MODES)
@given(x=st.floats(-(2.0**23), 2.0**23, width=32))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_rounds_to_the_nearest_or_down(name, x):
    rounded = ROUND_MODES[name](torch.tensor([x])).item()
    assert rounded == int(rounded)
    assert abs(rounded - x) <= 0.5 if name in NEAREST else rounded <= x < rounded + 1
