"""What every range method promises, for every specification that a config can ask for."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from support.extended import one_of_each
from support.positional import fake_quantize

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.rounding import NEAREST, ROUND_MODES
from quantizer.observers import NonFiniteError, ObservationError, Observer, UnobservedError
from quantizer.tables import RANGE_METHODS


def specs(bit_widths, round_modes):
    return [
        QuantizationSpec(
            bit_width=bit_width,
            symmetric=symmetric,
            scale_type=scale_type,
            round_mode=round_mode,
            qscheme="per_tensor" if ch_axis is None else "per_channel",
            ch_axis=ch_axis,
            method=method,
            percentage=99.0,
        )
        for method, symmetric, scale_type, ch_axis, bit_width, round_mode in product(
            RANGE_METHODS,
            (True, False),
            ("float", "poweroftwo"),
            (None, 0),
            bit_widths,
            round_modes,
        )
        if (symmetric or not RANGE_METHODS[method].symmetric_only)
        and (scale_type != "float" or not RANGE_METHODS[method].powers_of_two_only)
    ]


def scaled_specs():
    """Floating-point formats and groups, with every method that can go with them."""
    cuts = [
        ("per_tensor", None, None),
        ("per_channel", 0, None),
        ("per_group", 1, 7),
        ("per_group", 0, 2),
    ]
    kinds = [
        {"bit_width": 4},
        {"bit_width": 4, "symmetric": False},
        {"dtype": "fp8_e4m3"},
        {"dtype": "fp6_e3m2", "scale_type": "poweroftwo"},
        {"dtype": "fp4", "scale_type": "e8m0", "scale_mode": "even"},
        {"dtype": "bfp16", "scale_type": "e8m0"},
    ]
    for method, kind, (qscheme, ch_axis, group_size) in product(RANGE_METHODS, kinds, cuts):
        spec = QuantizationSpec(
            **kind, method=method, qscheme=qscheme, ch_axis=ch_axis, group_size=group_size
        )
        integer = spec.dtype == "int" and (
            spec.symmetric or not RANGE_METHODS[method].symmetric_only
        )
        if not RANGE_METHODS[method].powers_of_two_only and (
            integer or (spec.dtype != "int" and not RANGE_METHODS[method].integers_only)
        ):
            yield spec


def label_of_scaled(spec):
    return f"{label(spec)}-{spec.dtype}-{spec.ch_axis}"


def by_turns(bit_widths, round_mode):
    """Every spec, whose width is one of these by turns."""
    of_widths = [specs((width,), [round_mode]) for width in bit_widths]
    return one_of_each(zip(*of_widths, strict=True))


def label(spec):
    words = [spec.method, f"b{spec.bit_width}", spec.scale_type, spec.qscheme, spec.round_mode]
    return "-".join([*words, "symmetric" if spec.symmetric else "asymmetric"])


def batches(count=3):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, 50, generator=generator) * (1 + i) + 0.3 for i in range(count)]


def observed(spec, tensors):
    observer = Observer(spec)
    for x in tensors:
        observer.observe(x)
    return observer


def quantized(x, spec, qparams):
    bounds = spec.quant_min, spec.quant_max
    return fake_quantize(
        x, qparams.scale, qparams.zero_point, *bounds, spec.round_mode, spec.ch_axis
    )


def broadcast(row, spec):
    return row if spec.ch_axis is None else row[:, None]


def same(one, other):
    return torch.equal(one.scale, other.scale) and torch.equal(one.zero_point, other.zero_point)


def in_turn():
    """Every rounding with every method and every width, by turns."""
    widths, modes = (2, 3, 4, 8, 16), [*ROUND_MODES]
    for number, spec in enumerate(specs(widths, modes[:1])):
        step = number + number // len(modes)
        yield replace(spec, round_mode=modes[step % len(modes)])


def test_every_rounding_meets_every_method_and_width():
    pairs = {(spec.method, spec.round_mode) for spec in in_turn()}
    assert pairs == {*product(RANGE_METHODS, ROUND_MODES)}
    pairs = {(spec.bit_width, spec.round_mode) for spec in in_turn()}
    assert pairs == {*product((2, 3, 4, 8, 16), ROUND_MODES)}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*in_turn()], ids=label)
def test_scale_and_zero_point_fit_the_grid_and_the_data(spec):
    x = batches(1)[0]
    qparams = observed(spec, [x]).qparams()
    shape = () if spec.ch_axis is None else (len(x),)
    assert (qparams.scale.dtype, qparams.scale.shape) == (torch.float32, shape)
    assert (qparams.zero_point.dtype, qparams.zero_point.shape) == (torch.int32, shape)
    assert (
        (qparams.zero_point >= spec.quant_min) & (qparams.zero_point <= spec.quant_max)
    ).all()
    if spec.symmetric:
        assert not qparams.zero_point.any()
    if spec.scale_type == "poweroftwo":
        assert (torch.frexp(qparams.scale).mantissa == 0.5).all()
    assert not quantized(torch.zeros_like(x), spec, qparams).any()

    scale, zero_point = broadcast(qparams.scale, spec), broadcast(qparams.zero_point, spec)
    inside = (x >= (spec.quant_min - zero_point) * scale) & (
        x <= (spec.quant_max - zero_point) * scale
    )
    error = (x - quantized(x, spec, qparams)).abs()
    step = scale / 2 if spec.round_mode in NEAREST else scale
    # Float32 resolves 2^-23 of a value
    assert (error <= step + x.abs() * 2.0**-22)[inside].all()
    assert inside.float().mean() > (0.9 if spec.bit_width >= 8 else 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("spec", by_turns((4, 8), "half_up"), ids=label)
def test_constant_tensors_come_back_within_a_step(spec):
    for value in (0.0, 1e-45, -1e-45, 1e-30, -3.0, 1e30, -1e37):
        x = torch.full((3, 20), value)
        qparams = observed(spec, [x]).qparams()
        assert (qparams.scale >= 2.0**-126).all(), value
        error = (x - quantized(x, spec, qparams)).abs()
        assert (error <= broadcast(qparams.scale, spec)).all(), value


@pytest.mark.parametrize("spec", by_turns((2, 8, 16), "half_even"), ids=label)
def test_the_whole_float_range_stays_finite(spec):
    largest = torch.finfo(torch.float32).max
    for x in (
        torch.full((2, 9), largest),
        torch.full((2, 9), -largest),
        torch.tensor([[largest, -largest, 0.0, 1.0]] * 2),
    ):
        assert quantized(x, spec, observed(spec, [x]).qparams()).isfinite().all()


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_a_silent_channel_or_batch_gives_a_scale_and_spoils_no_other(spec):
    loud = batches(1)[0]
    if spec.ch_axis is None:
        assert same(
            observed(spec, [torch.zeros(4, 50), loud]).qparams(),
            observed(spec, [loud]).qparams(),
        )
    else:
        loud[1] = 0
        qparams = observed(spec, [loud]).qparams()
        assert qparams.scale[1] == 1
        alone = observed(spec, [loud[2:]]).qparams()
        assert torch.equal(qparams.scale[2:], alone.scale)


STATISTICS = ("max", "mean", "median", "modal")


def statistics_in_turn():
    """Every statistic with every method, by turns."""
    for number, spec in enumerate(specs((8,), ["half_even"])):
        yield replace(spec, statistic=STATISTICS[number % len(STATISTICS)])


def test_every_statistic_meets_every_method():
    pairs = {(spec.method, spec.statistic) for spec in statistics_in_turn()}
    assert pairs == {*product(RANGE_METHODS, STATISTICS)}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*statistics_in_turn()], ids=label)
def test_merging_equals_observing_all_batches_in_any_order(spec):
    first, second, third = batches()
    merged = observed(spec, [third])
    merged.merge(observed(spec, [first, second]))
    together = observed(spec, [first, second, third])
    assert same(merged.qparams(), together.qparams())
    assert torch.equal(merged.low, together.low) and torch.equal(merged.high, together.high)


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_state_round_trip(spec):
    observer = observed(spec, batches())
    restored = Observer(spec)
    restored.load_state_dict(observer.state_dict())
    assert same(restored.qparams(), observer.qparams())
    restored.load_state_dict(Observer(spec).state_dict())
    with pytest.raises(UnobservedError):
        restored.qparams()


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_nothing_seen_is_an_error(spec):
    for read in (
        Observer(spec).qparams,
        lambda: Observer(spec).low,
        lambda: Observer(spec).high,
    ):
        with pytest.raises(UnobservedError, match="No values"):
            read()


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_what_is_not_finite_is_counted_and_leaves_no_trace(spec):
    good, bad = batches(1)[0], batches(1)[0]
    bad[1, 2], bad[3, 4], bad[3, 5] = math.nan, math.inf, -math.inf
    observer = observed(spec, [good])
    with pytest.raises(NonFiniteError, match="1 NaN and 2 infinite among 200") as caught:
        observer.observe(bad)
    assert (caught.value.nans, caught.value.infinities) == (1, 2)
    with pytest.raises(ObservationError, match="no values"):
        observer.observe(torch.empty(0, 3))
    assert same(observer.qparams(), observed(spec, [good]).qparams())


def of_other_types():
    """Every spec, and one of the other types by turns."""
    types = torch.float16, torch.bfloat16, torch.float64
    return one_of_each(
        [(spec, dtype) for dtype in types] for spec in specs((8,), ["half_even"])
    )


def name_of(value):
    return label(value) if isinstance(value, QuantizationSpec) else str(value)


@pytest.mark.parametrize(("spec", "dtype"), of_other_types(), ids=name_of)
def test_other_float_types_are_observed_as_their_values(spec, dtype):
    x = batches(1)[0].to(dtype)
    assert same(observed(spec, [x]).qparams(), observed(spec, [x.float()]).qparams())


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_float64_beyond_float32_gets_the_largest_scale(spec):
    qparams = observed(
        spec, [torch.tensor([[1e300, -1e300, 2.0]] * 2, dtype=torch.float64)]
    ).qparams()
    assert (qparams.scale > 1e35).all() and qparams.scale.isfinite().all()


@pytest.mark.parametrize("spec", specs((8,), ["half_even"]), ids=label)
def test_the_tensor_itself_is_left_alone(spec):
    x = batches(1)[0]
    kept = x.clone()
    observed(spec, [x])
    assert torch.equal(x, kept)


@pytest.mark.slow
@pytest.mark.parametrize("spec", list(scaled_specs()), ids=label_of_scaled)
def test_groups_and_scaled_formats_have_a_scale_for_every_row(spec):
    x = batches(1)[0]
    qparams = observed(spec, [x]).qparams()
    shape = scale_shape(tuple(x.shape), (spec.qscheme, spec.ch_axis, spec.group_size, 1))
    assert (qparams.scale.dtype, qparams.scale.shape) == (torch.float32, shape)
    assert (qparams.zero_point.dtype, qparams.zero_point.shape) == (torch.int32, shape)
    assert spec.symmetric is False or not qparams.zero_point.any()
    if spec.scale_type != "float":
        assert (torch.frexp(qparams.scale).mantissa == 0.5).all()
    y = quantize_tensor(x, spec, qparams.scale, qparams.zero_point)
    assert y.shape == x.shape
    assert (y - x).square().mean() < 0.05 * x.square().mean()
    again = Observer(spec)
    again.load_state_dict(observed(spec, [x]).state_dict())
    assert torch.equal(again.qparams().scale.flatten(), qparams.scale.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["percentile", "mse"])
def test_many_rows_give_what_each_gives_alone(method):
    """Rows are taken some thousands at a time."""
    x = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))
    spec = QuantizationSpec(
        bit_width=3,
        qscheme="per_group",
        ch_axis=1,
        group_size=8,
        method=method,
        percentage=80.0,
    )
    scale = observed(spec, [x]).qparams().scale
    for row in (0, 2499, 2500, 4999):
        alone = observed(replace(spec, qscheme="per_tensor"), [x[row]]).qparams().scale
        assert scale[row, 0] == alone
