"""Scales and zero points: the ends of the code_range, powers of two, and ranges at the edge of
float32.
"""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.formats import SCALE_MODES, FloatRange, IntegerRange
from quantizer.numerics.qparams import (
    power_of_two,
    qparams_from_range,
    qparams_from_step,
    step_from_range,
    uncut,
)
from quantizer.tables import NUMBER_FORMATS

SIGNED, UNSIGNED, ASYMMETRIC = (
    IntegerRange(-128, 127),
    IntegerRange(0, 255),
    IntegerRange(0, 255, symmetric=False),
)
POWER_OF_TWO = IntegerRange(-128, 127, scale_type="poweroftwo", finest_position=12)

reals = st.floats(-(2.0**120), 2.0**120, width=32)
code_ranges = st.builds(
    lambda bits, signed, narrow, symmetric, scale_type: IntegerRange(
        -(2 ** (bits - 1)) + narrow if signed and symmetric else 0,
        2 ** (bits - 1) - 1 if signed and symmetric else 2**bits - 1,
        symmetric,
        scale_type,
    ),
    st.integers(2, 16),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["float", "poweroftwo"]),
)


def qparams(low, high, code_range):
    return qparams_from_range(torch.tensor(low), torch.tensor(high), code_range)


@pytest.mark.parametrize(
    ("low", "high", "code_range", "scale", "zero_point"),
    [
        (-1.0, 2.54, SIGNED, 0.02, 0),
        (-2.54, 1.0, SIGNED, 0.02, 0),
        (0.0, 5.1, UNSIGNED, 0.02, 0),
        (-1.0, 4.1, ASYMMETRIC, 0.02, 50),
        (1.0, 5.1, ASYMMETRIC, 0.02, 0),  # extended to contain 0
        (-5.1, -1.0, ASYMMETRIC, 0.02, 255),
        (-1.0, 1.0, IntegerRange(0, 15, symmetric=False), 2 / 15, 8),  # 7.5, rounded to even
        (0.0, 0.0, SIGNED, 1.0, 0),
        (0.0, 0.0, ASYMMETRIC, 1.0, 0),
    ],
)
def test_the_range_fills_the_codes(low, high, code_range, scale, zero_point):
    found = qparams(low, high, code_range)
    assert found.scale.item() == pytest.approx(scale, rel=1e-6)
    assert found.zero_point.item() == zero_point


def step_by_definition(low, high, code_range):
    """The distance of two codes in Python's own float64; e8m0 in the mode "floor"."""
    low, high = min(low, 0.0), max(high, 0.0)
    if code_range.scale_type == "e8m0":
        amax = max(-low, high)
        return 2.0 ** (math.frexp(amax)[1] - 1 - code_range.row.emax) if amax else 0.0
    if isinstance(code_range, FloatRange):
        step = max(-low, high) / code_range.row.largest
    elif not code_range.symmetric:
        step = (high - low) / (code_range.quant_max - code_range.quant_min)
    elif code_range.scale_type == "float":
        step = max(-low, high) / code_range.quant_max
    else:
        step = max(low / (code_range.quant_min - 0.5), high / (code_range.quant_max + 0.5))
    if code_range.scale_type == "float" or not step:
        return step
    mantissa, exponent = math.frexp(step)
    return 2.0 ** (exponent - (mantissa == 0.5))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize(
    "code_range",
    [
        *(IntegerRange(-128, 127, scale_type=kind) for kind in ("float", "poweroftwo")),
        *(
            IntegerRange(0, 15, symmetric=False, scale_type=kind)
            for kind in ("float", "poweroftwo")
        ),
        IntegerRange(-(2**31), 2**31 - 1),
        *(FloatRange("fp4", kind) for kind in ("float", "poweroftwo", "e8m0")),
        FloatRange("mx_int8", "e8m0"),
    ],
    ids=str,
)
def test_the_steps_of_many_rows_equal_the_definition(code_range, dtype):
    """Ranges of any width and on either side of 0, subnormal ones too; the arguments stay as
    they are.
    """
    generator = torch.Generator().manual_seed(0)
    ends = torch.randn(2, 1001, generator=generator, dtype=torch.float64)
    ends *= 10.0 ** torch.linspace(-42, 38, 1001, dtype=torch.float64)
    low, high = ends.to(dtype).nan_to_num().sort(0).values
    kept = low.clone(), high.clone()
    expected = [
        step_by_definition(*pair, code_range)
        for pair in zip(low.tolist(), high.tolist(), strict=True)
    ]
    assert step_from_range(low, high, code_range).tolist() == expected
    qparams_from_range(low, high, code_range)
    assert torch.equal(low, kept[0]) and torch.equal(high, kept[1])


def test_a_step_stays_as_it_is():
    step = torch.tensor([0.0, 0.3, 5.0], dtype=torch.float64)
    for code_range in (SIGNED, POWER_OF_TWO, FloatRange("fp4", "e8m0")):
        qparams_from_step(step, step, code_range)
    assert step.tolist() == [0.0, 0.3, 5.0]


@pytest.mark.parametrize(
    ("low", "high", "position"),
    [
        (-1, 1, 6),
        (0, 127.5, 0),
        (-128.5, 0, 0),
        (0, 127.6, -1),
        (0, 200, -1),
        (0, 0, 12),
        (-1e-9, 1e-9, 12),
    ],
)
def test_power_of_two_positions_cut_off_half_a_step_at_most(low, high, position):
    assert qparams(float(low), float(high), POWER_OF_TWO).scale.item() == 2.0**-position


def test_without_a_finest_position_small_values_keep_all_codes():
    scale = qparams(-1e-9, 1e-9, IntegerRange(-128, 127, scale_type="poweroftwo")).scale.item()
    assert 63 <= 1e-9 / scale <= 127.5


def test_powers_of_two_work_with_zero_points():
    found = qparams(-1.0, 3.0, IntegerRange(0, 255, symmetric=False, scale_type="poweroftwo"))
    assert (found.scale.item(), found.zero_point.item()) == (2.0**-5, 32)


def test_32_bit_codes_are_scaled_in_float64():
    found = qparams(-1.0, 1.0, IntegerRange(-(2**31), 2**31 - 1))
    assert found.scale.item() == pytest.approx(1 / (2**31 - 1), rel=1e-7)


@pytest.mark.parametrize("code_range", [SIGNED, UNSIGNED, ASYMMETRIC, POWER_OF_TWO])
@pytest.mark.parametrize("high", [1e-45, 1e-38, 3.4e38])
def test_extreme_ranges_give_normal_scales_and_finite_values(code_range, high):
    scale = qparams(0.0, high, code_range).scale
    assert scale >= 2.0**-126
    assert (scale * max(-code_range.quant_min, code_range.quant_max)).isfinite()


def test_channels_are_scaled_each_by_itself():
    found = qparams_from_range(
        torch.tensor([-1.0, 0.0, 0.0]), torch.tensor([4.1, 0.0, 5.1]), ASYMMETRIC
    )
    assert found.scale.tolist() == pytest.approx([0.02, 1.0, 0.02], rel=1e-6)
    assert found.zero_point.tolist() == [50, 0, 0]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 1), (1, 5), (-1, 0)])
def test_a_grid_without_a_code_above_zero_is_refused(low, high):
    with pytest.raises(ValueError, match="quant_min <= 0 < quant_max"):
        IntegerRange(low, high)


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match='"pow2" is not a scale type'):
        IntegerRange(-8, 7, scale_type="pow2")
    with pytest.raises(
        ValueError,
        match='"half" is not a rule for symmetric scales; known are half_range, quant_max',
    ):
        IntegerRange(-8, 7, symmetric_scale="half")


@pytest.mark.parametrize(
    ("bits", "divisor"),
    # AMD Quark: X of absmax 5.3 in int8 has the scale 0.0415686
    [(8, 127.5), (4, 7.5), (3, 3.5), (2, 1.5)],
)
def test_half_range_divides_by_half_the_distance_of_the_outer_codes(bits, divisor):
    code_range = IntegerRange(
        -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, symmetric_scale="half_range"
    )
    assert qparams(-5.3, 1.0, code_range).scale.item() == pytest.approx(5.3 / divisor, rel=1e-6)
    assert qparams(-1.0, 5.3, code_range) == qparams(-5.3, 1.0, code_range)
    assert uncut(code_range) == divisor / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize(
    "code_range",
    [(-127, 127), (0, 255), (0, 255, False), (-128, 127, True, "poweroftwo")],
    ids=str,
)
def test_half_range_says_nothing_where_no_code_is_left_over(code_range):
    plain, half = (
        IntegerRange(*code_range),
        IntegerRange(*code_range, symmetric_scale="half_range"),
    )
    assert qparams(-0.0, 5.3, half) == qparams(-0.0, 5.3, plain)
    assert uncut(half) == 1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_quant_min_gives_the_outermost_value_the_least_code_with_either_sign(bits):
    least = -(2 ** (bits - 1))
    code_range = IntegerRange(least, -least - 1, symmetric_scale="quant_min")
    low = torch.tensor([-5.3, -1.0, -2.0, 0.0])
    high = torch.tensor([1.0, 5.3, 2.0, 0.0])
    found = qparams_from_range(low, high, code_range)
    outermost = torch.tensor([-5.3, 5.3, -2.0])
    assert torch.allclose(found.scale[:3] * least, outermost)
    assert found.scale[3] == 1 and not found.zero_point.any()
    assert uncut(code_range) == 1


@given(ends=st.lists(reals, min_size=2, max_size=2), code_range=code_ranges)
@settings(derandomize=True, max_examples=300, deadline=None)
def test_any_range_and_grid(ends, code_range):
    low, high = min(ends), max(ends)
    if code_range.symmetric and code_range.quant_min == 0:
        low, high = 0.0, abs(high)
    found = qparams(low, high, code_range)
    scale, zero_point = found.scale.double().item(), found.zero_point.item()
    assert 2.0**-126 <= scale < float("inf")
    assert code_range.quant_min <= zero_point <= code_range.quant_max
    # Nothing of the range is cut off but half a step, or a few roundings of float32.
    assert (code_range.quant_min - zero_point - 0.5) * scale <= low * (
        1 - 1e-6
    ) + 1e-40 or low >= 0
    assert (code_range.quant_max - zero_point + 0.5) * scale >= high * (1 - 1e-6) or high <= 0
    if code_range.scale_type == "poweroftwo":
        assert power_of_two(found.scale.double()).item() == scale


def magnitudes() -> Tensor:
    """Return magnitudes by the bits of float32: all exponents, the ends and middles of their
    mantissas with their neighbours, and some below the normal numbers.
    """
    exponents = torch.arange(255, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x600000, 0x7FFFFF])
    sixteenths = torch.arange(0, 0x800000, 0x80000)
    fine = torch.cat([mantissas, sixteenths, sixteenths + 1]).int()
    bits = (exponents[:, None] + fine).flatten()
    return bits.view(torch.float32)


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize(
    "dtype", [name for name, row in NUMBER_FORMATS.items() if not row.levels]
)
def test_shared_exponents_are_read_off_float32_as_float64_has_them(
    dtype: str, mode: str
) -> None:
    some = magnitudes()
    high = torch.cat([some, some])
    low = torch.cat([torch.zeros_like(some), some[torch.randperm(len(some))]])
    code_range = FloatRange(dtype, "e8m0", mode)
    found, exact = (
        qparams_from_range(-low, high, code_range),
        qparams_from_range(-low.double(), high.double(), code_range),
    )
    assert torch.equal(found.scale, exact.scale)
    assert torch.equal(found.zero_point, exact.zero_point)
    assert found.scale.dtype == torch.float32
    assert found.zero_point.dtype == torch.int32
