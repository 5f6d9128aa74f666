"""Scaled floating-point formats: scales of block formats, values against the definition in
float64.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.numerics.fake_quantize import fake_cast, fake_cast_plain
from quantizer.numerics.formats import FloatRange, cast_round_trip_
from quantizer.numerics.qparams import qparams_from_range
from quantizer.tables import NUMBER_FORMATS

SCALED = [name for name, row in NUMBER_FORMATS.items() if row.mantissa is not None]
KINDS = [
    ("float", "floor"),
    ("poweroftwo", "floor"),
    ("e8m0", "floor"),
    ("e8m0", "even"),
    ("e8m0", "ceil"),
]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scale_of(amax, *code_range):
    return qparams_from_range(
        torch.tensor(-amax), torch.tensor(0.0), FloatRange(*code_range)
    ).scale.item()


@pytest.mark.parametrize(
    ("dtype", "mode", "amax", "scale"),
    [
        ("fp4", "floor", 4.0, 1.0),
        ("fp4", "floor", 7.99, 1.0),  # 6 is the largest value, so 7.99 is cut off
        ("fp4", "even", 6.99, 1.0),
        ("fp4", "even", 7.0, 2.0),  # 1.75 of the exponent is the tie for one bit of mantissa
        ("fp4", "ceil", 4.0, 1.0),
        ("fp4", "ceil", 4.01, 2.0),
        ("fp8_e4m3", "floor", 448.0, 1.0),
        ("fp8_e4m3", "floor", 512.0, 2.0),
        ("fp8_e4m3", "even", 495.9, 1.0),
        ("fp8_e4m3", "even", 496.0, 2.0),
        ("fp8_e5m2", "floor", 1.0, 2.0**-15),
        ("fp6_e3m2", "floor", 1.0, 2.0**-4),
        ("fp6_e2m3", "floor", 1.0, 2.0**-2),
        ("mx_int8", "floor", 1.999, 1.0),
        ("bfp16", "even", 1.9921, 1.0),
        ("bfp16", "even", 1.9922, 2.0),  # 127.5 / 64 = 1.9921875 would need the code 128
        ("fp4", "floor", 2.0**-126, 2.0**-127),  # e8m0 ends there
        ("fp4", "floor", 0.0, 1.0),
    ],
)
def test_shared_exponents(dtype, mode, amax, scale):
    """OCP MX v1.0, section 6.3: floor(log2 amax) - emax; "even" and "ceil" round the exponent
    up first.
    """
    assert scale_of(amax, dtype, "e8m0", mode) == scale


@pytest.mark.parametrize(("amax", "scale"), [(6.0, 1.0), (6.01, 2.0), (3.0, 0.5), (0.0, 1.0)])
def test_a_power_of_two_scale_is_the_least_that_cuts_nothing_off(amax, scale):
    assert scale_of(amax, "fp4", "poweroftwo") == scale


@pytest.mark.parametrize("name", SCALED)
def test_a_float_scale_puts_the_largest_magnitude_on_the_largest_value(name):
    assert scale_of(3.0, name) == pytest.approx(3.0 / NUMBER_FORMATS[name].largest, rel=1e-7)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3.4e38])
def test_extreme_ranges_stay_finite(name, kind, amax):
    x = torch.tensor([amax, -amax, 0.0])
    y = fake_cast(x, torch.tensor(scale_of(amax, name, *kind)), name)
    assert y.isfinite().all()
    assert (y[0] - x[0]).abs() <= x[0] / 2 + 1e-37  # half at most is cut off


@pytest.mark.parametrize("kind", [("float8", "floor"), ("e8m0", "up")])
def test_what_is_no_scale_is_refused(kind):
    with pytest.raises(ValueError, match=r"is not a scale (type|mode); known are"):
        FloatRange("fp4", *kind)
    with pytest.raises(ValueError, match="no zero point"):
        FloatRange("fp4", symmetric=False)
    with pytest.raises(ValueError, match='did you mean "fp4"'):
        FloatRange("fp44")


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("ch_axis", [None, 0, 1, -1])
def test_values_equal_the_definition(name, ch_axis):
    x = randn(5, 6, 7) * 3
    scale = (
        torch.rand(
            () if ch_axis is None else x.shape[ch_axis],
            generator=torch.Generator().manual_seed(1),
        )
        + 0.05
    )
    shape = [1] * 3
    if ch_axis is not None:
        shape[ch_axis] = -1
    s = scale.view(shape)
    expected = cast_round_trip_(x / s, name) * s
    assert torch.equal(fake_cast(x, scale, name, ch_axis), expected)
    assert torch.equal(fake_cast_plain(x, scale, name, ch_axis), expected)
    half = fake_cast(x.bfloat16(), scale, name, ch_axis)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, fake_cast(x.bfloat16().float(), scale, name, ch_axis).bfloat16())
    assert fake_cast(x, scale, name, ch_axis, inplace=True) is x
    assert torch.equal(x, expected)


@given(
    x=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16),
    name=st.sampled_from(SCALED),
    kind=st.sampled_from(KINDS),
    shift=st.integers(-8, 8),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_twice_is_once_and_powers_of_two_pass_through(x, name, kind, shift):
    values, factor = torch.tensor(x), 2.0**shift
    code_range = FloatRange(name, *kind)
    scale = qparams_from_range(values.min(), values.max(), code_range).scale
    y = fake_cast(values, scale, name)
    if kind[0] != "float":  # y / scale is exact for powers of two only
        assert torch.equal(fake_cast(y, scale, name), y)
    if (values.abs().max() > 2.0**-80) and (values.abs() >= 2.0**-80).logical_or(
        values == 0
    ).all():
        moved = qparams_from_range(
            values.min() * factor, values.max() * factor, code_range
        ).scale
        assert moved == scale * factor
        assert torch.equal(fake_cast(values * factor, moved, name), y * factor)


@given(
    x=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=16),
    name=st.sampled_from(SCALED),
)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_the_error_is_half_a_step_of_the_value_s_own_exponent(x, name):
    values, row = torch.tensor(x).double(), NUMBER_FORMATS[name]
    scale = qparams_from_range(values.min(), values.max(), FloatRange(name)).scale
    scaled = (values / scale.double()).abs().clamp(min=2.0**row.least)
    step = torch.exp2(torch.floor(torch.log2(scaled)) - row.mantissa) * scale.double()
    assert ((fake_cast(values, scale, name) - values).abs() <= step / 2 * (1 + 1e-6)).all()


def test_the_memory_that_is_kept_to_work_in_is_free_of_the_mode_it_was_made_in():
    x, scale = torch.tensor([[-9.0, 0.3], [0.5, 5.2]]), torch.tensor([0.5, 2.0])
    with torch.inference_mode():
        inside = fake_cast(x.double(), scale, "fp6_e2m3", ch_axis=0)
    assert torch.equal(fake_cast(x.double(), scale, "fp6_e2m3", ch_axis=0), inside)
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(fake_cast, x * k, scale, "fp4", 0) for k in (1, 2) for _ in range(8)
        ]
    for k, found in zip((1, 2), (both[0], both[8]), strict=True):
        assert torch.equal(found.result(), fake_cast_plain(x * k, scale, "fp4", 0))
