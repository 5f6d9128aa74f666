"""The observer: batches to one scale, what it refuses, how it samples large tensors."""

import math
from dataclasses import replace

import pytest
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.observers import NegativeValuesError, Observer
from quantizer.observers.converted import combine
from quantizer.observers.observed_batch import SAMPLE_SIZE, ObservedBatch, as_rows, stride_for

SPEC = QuantizationSpec()
POWER_OF_TWO = QuantizationSpec(scale_type="poweroftwo")


def observed(spec, *batches):
    observer = Observer(spec)
    for batch in batches:
        observer.observe(batch)
    return observer


def scale(spec, *batches):
    return observed(spec, *batches).qparams().scale.item()


BATCHES = [torch.tensor([127 * s]) for s in (0.1, 0.2, 0.2, 0.4)]


@pytest.mark.parametrize(
    ("statistic", "expected"), [("max", 0.4), ("mean", 0.225), ("median", 0.2), ("modal", 0.2)]
)
def test_the_statistic_is_taken_over_the_batches_scales(statistic, expected):
    assert scale(replace(SPEC, statistic=statistic), *BATCHES) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(
    ("statistic", "expected"), [("max", 1), ("mean", 1), ("median", 0.5), ("modal", 0.5)]
)
def test_a_statistic_of_powers_of_two_is_a_power_of_two(statistic, expected):
    batches = [torch.tensor([127.0 * s]) for s in (0.25, 0.5, 0.5, 1.0)]  # mean 0.5625
    assert scale(replace(POWER_OF_TWO, statistic=statistic), *batches) == expected


def test_equally_frequent_powers_of_two_give_the_coarser_one():
    batches = [torch.tensor([127.0]), torch.tensor([63.0])]
    assert scale(replace(POWER_OF_TWO, statistic="modal"), *batches) == 1


@pytest.mark.parametrize(
    ("statistic", "low", "high"),
    [("max", -3.0, 8.0), ("mean", -2.0, 5.0), ("median", -2.0, 4.0), ("modal", -3.0, 8.0)],
)
def test_asymmetric_ranges_are_reduced_at_either_end(statistic, low, high):
    batches = [torch.tensor(ends) for ends in ([-1.0, 4.0], [-3.0, 3.0], [-2.0, 8.0])]
    qparams = observed(replace(SPEC, symmetric=False, statistic=statistic), *batches).qparams()
    assert qparams.scale.item() == pytest.approx((high - low) / 255, rel=1e-6)
    assert qparams.zero_point.item() == round(-low / (high - low) * 255)


def test_maxmin_with_max_does_not_depend_on_how_the_data_are_cut_into_batches():
    """1 x 256 and 4 x 64 images."""
    images = torch.randn(256, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        spec = replace(SPEC, symmetric=symmetric)
        whole, parts = (
            observed(spec, images).qparams(),
            observed(spec, *images.split(64)).qparams(),
        )
        assert torch.equal(whole.scale, parts.scale) and torch.equal(
            whole.zero_point, parts.zero_point
        )


def test_extremes_are_those_of_all_batches_whatever_the_method_clips():
    observer = observed(
        replace(SPEC, method="percentile", percentage=50.0),
        torch.tensor([-2.0, 1.0]),
        torch.tensor([9.0, 0]),
    )
    assert (observer.low.item(), observer.high.item()) == (-2, 9)
    assert observer.low.shape == ()


def test_channels_lie_along_any_axis():
    x = torch.tensor([[1.0, -20.0, 3.0], [4.0, 5.0, 60.0]])
    spec = replace(SPEC, qscheme="per_channel", ch_axis=1)
    assert observed(spec, x).low.tolist() == [1, -20, 3]
    assert observed(spec, x).high.tolist() == [4, 5, 60]
    assert (observed(spec, x).qparams().scale * 127).tolist() == pytest.approx(
        [4, 20, 60], rel=1e-6
    )


def test_unsigned_symmetric_codes_take_no_negative_values():
    spec = replace(SPEC, signed=False)
    assert scale(spec, torch.tensor([0.0, 25.5])) == pytest.approx(0.1, rel=1e-6)
    with pytest.raises(NegativeValuesError, match=r"-0\.5"):
        Observer(spec).observe(torch.tensor([-0.5, 1.0]))


def test_what_has_no_range_is_refused():
    with pytest.raises(ValueError, match='did you mean "percentile"'):
        Observer(replace(SPEC, method="percentil"))
    with pytest.raises(ValueError, match='did you mean "mean"'):
        Observer(replace(SPEC, statistic="meen"))
    with pytest.raises(ValueError, match="bfloat16"):
        Observer(replace(SPEC, dtype="bfloat16"))
    with pytest.raises(ValueError, match="scale_type poweroftwo"):
        Observer(replace(SPEC, method="diffs"))
    for method in ("mse", "entropy"):
        with pytest.raises(ValueError, match="symmetric spec"):
            Observer(replace(SPEC, method=method, symmetric=False))
    with pytest.raises(TypeError, match="int64"):
        Observer(SPEC).observe(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["maxmin", "percentile"])
def test_a_stored_state_goes_on_with_batches_of_any_dtype(method, dtype):
    spec = QuantizationSpec(
        qscheme="per_channel", ch_axis=0, symmetric=False, method=method, statistic="mean"
    )
    x, y = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, other = observed(spec, x), Observer(spec)
    state = first.state_dict()
    assert state["batches"].dtype == torch.float64 and state["batches"].shape == (1, 4, 3)
    other.load_state_dict(state)
    other.observe(y)
    assert torch.equal(other.qparams().scale, observed(spec, x, y).qparams().scale)
    assert torch.equal(other.low, torch.minimum(x, y).amin(1).double())


def test_only_observers_of_one_spec_are_merged():
    with pytest.raises(ValueError, match="one spec"):
        Observer(SPEC).merge(Observer(POWER_OF_TWO))


def test_only_observers_of_one_scale_and_one_spec_are_combined():
    channels = replace(SPEC, qscheme="per_channel", ch_axis=0)
    for spec, other in ((SPEC, POWER_OF_TWO), (channels, channels)):
        with pytest.raises(ValueError, match="with one scale"):
            combine(spec, [(Observer(spec), 1.0), (Observer(other), 1.0)])


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"batches": torch.zeros(3)},
        {"batches": torch.zeros(1, 4, 1), "more": torch.zeros(1)},
    ],
)
def test_a_foreign_state_is_refused(state):
    with pytest.raises(ValueError, match="batches"):
        Observer(SPEC).load_state_dict(state)


@pytest.mark.parametrize(
    "length", [1, 5, 2**16, 2**16 + 1, 10 * 64 * 112 * 112, 10 * 512 * 49, 7 * 11 * 13 * 8192]
)
def test_the_sampling_stride_shares_no_divisor_with_the_length(length):
    stride = stride_for(length, SAMPLE_SIZE)
    assert math.gcd(stride, length) == 1
    assert -(-length // stride) <= SAMPLE_SIZE
    assert -(-length // stride) >= min(length, SAMPLE_SIZE / 3)


def test_a_sample_sees_every_column_and_the_extremes_see_every_value():
    images = torch.zeros(10, 16, 112, 112)
    images[..., 55] = 1.0
    images[3, 2, 1, 0] = 50.0
    rows = as_rows(images)
    low, high = (end.view(1).double() for end in rows.aminmax())
    sample = ObservedBatch(rows, low, high).sample()
    assert sample.numel() <= SAMPLE_SIZE
    assert (sample == 1).double().mean().item() == pytest.approx(1 / 112, rel=0.05)
    assert observed(SPEC, images).high == 50


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse", "diffs"])
def test_a_large_tensor_gives_nearly_the_scale_of_its_whole_histogram(method):
    """The same distribution, once below the sampling limit and once far above it."""
    spec = replace(
        POWER_OF_TWO if method == "diffs" else SPEC, method=method, percentage=99.9, bit_width=4
    )
    values = torch.randn(1 << 21, generator=torch.Generator().manual_seed(3)).clamp(-4, 4)
    small = torch.cat([values[: SAMPLE_SIZE - 2], torch.tensor([4.0, -4.0])])
    assert scale(spec, values) == pytest.approx(scale(spec, small), rel=0.06)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_every_layout_gives_the_same_scale(layout):
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    other = {
        "contiguous": x,
        "channels_last": x.to(memory_format=torch.channels_last),
        "strided": torch.stack([x, x + 9], -1)[..., 0],
    }[layout]
    spec = replace(SPEC, method="mse")
    assert scale(spec, other) == scale(spec, x)


def test_one_sided_data_are_clipped_alike_by_symmetric_and_asymmetric_codes():
    x = torch.relu(torch.randn(10_000, generator=torch.Generator().manual_seed(0)))
    spec = QuantizationSpec(method="percentile", percentage=99.0, signed=False)
    assert scale(spec, x) == scale(replace(spec, symmetric=False), x)


def test_an_asymmetric_percentile_clips_both_tails():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    qparams = observed(
        QuantizationSpec(method="percentile", percentage=99.0, symmetric=False), x
    ).qparams()
    low = (0 - qparams.zero_point) * qparams.scale
    high = (255 - qparams.zero_point) * qparams.scale
    assert ((x < low) | (x > high)).double().mean().item() == pytest.approx(0.01, abs=0.002)
    assert low.item() == pytest.approx(-high.item(), rel=0.02)
