"""Observers that see all batches as one: any cut of the samples into batches and any merging
give the same scale.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.positional import fake_quantize

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.histogram import BINS
from quantizer.observers import Observer, UnobservedError
from quantizer.observers.observed_batch import SLICE_SIZE, slices

MSE = QuantizationSpec(method="mse", statistic="pooled")
SPECS = {
    "mse": MSE,
    "mse, 4 bits": replace(MSE, bit_width=4, symmetric_scale="half_range"),
    "mse, powers of two": replace(MSE, scale_type="poweroftwo"),
    "percentile": replace(MSE, method="percentile", percentage=99.0),
    "percentile, asymmetric": replace(
        MSE, method="percentile", percentage=99.0, symmetric=False
    ),
    "entropy": replace(MSE, method="entropy"),
    "maxmin": replace(MSE, method="maxmin"),
    "fp8": replace(MSE, dtype="fp8_e4m3"),
    "channels": replace(
        MSE, method="percentile", percentage=90.0, qscheme="per_channel", ch_axis=1
    ),
}


def observed(spec, *batches):
    observer = Observer(spec)
    for batch in batches:
        observer.observe(batch)
    return observer


def found(observer):
    qparams = observer.qparams()
    return [
        qparams.scale.tolist(),
        qparams.zero_point.tolist(),
        observer.low.tolist(),
        observer.high.tolist(),
    ]


def images(seed, count=12):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 3, 5, 4, generator=draw)
        * torch.rand(count, 1, 1, 1, generator=draw)
        * 8
    )


@pytest.mark.parametrize("name", SPECS)
@given(seed=st.integers(0, 9), data=st.data())
@settings(derandomize=True, max_examples=8, deadline=None)
def test_any_cut_of_the_samples_and_any_order_of_merging_give_equal_scales(name, seed, data):
    x = images(seed)
    ends = [0, *sorted(data.draw(st.sets(st.integers(1, len(x) - 1)))), len(x)]
    batches = data.draw(st.permutations([x[a:b] for a, b in itertools.pairwise(ends)]))
    half = data.draw(st.integers(0, len(batches)))
    one, other = observed(SPECS[name], *batches[:half]), observed(SPECS[name], *batches[half:])
    one.merge(other)
    assert found(one) == found(observed(SPECS[name], x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_samples_of_large_tensors_do_not_depend_on_the_cut_either(layout):
    x = torch.randn(6, 8, 48, 48, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=layout
    )
    x = x * torch.arange(1.0, 7).view(-1, 1, 1, 1)
    assert slices(x)[0].numel() < x.numel() / 2
    assert slices(x)[0].numel() <= len(x) * SLICE_SIZE
    for spec in (SPECS["mse"], SPECS["percentile"]):
        assert (
            found(observed(spec, *x.split(1)))
            == found(observed(spec, x))
            == found(observed(spec, *x.split([4, 2])))
        )


def test_the_batches_of_a_statistic_do_show():
    """What the hierarchical form was like: the range of one batch or of single samples, 4.04 or
    4.55.
    """
    x = images(0)
    spec = replace(MSE, statistic="max")
    assert found(observed(spec, *x.split(1)))[0] != found(observed(spec, x))[0]


@pytest.mark.parametrize("data", ["normal", "relu", "laplace", "outliers"])
@pytest.mark.parametrize("percentage", [99.0, 99.9, 99.99])
def test_a_percentile_is_within_a_bin_of_the_exact_one(data, percentage):
    """A bin is at most 1/1024 of the largest magnitude."""
    x = sample(data)
    spec = replace(SPECS["percentile"], percentage=percentage)
    scale = observed(spec, *x.split(1000)).qparams().scale.item() * 127
    exact = x.abs().sort().values[math.ceil(len(x) * percentage / 100) - 1].item()
    assert abs(scale - exact) <= x.abs().max().item() / (BINS / 2)


@pytest.mark.parametrize("data", ["normal", "relu", "laplace", "outliers"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scale_type", ["float", "poweroftwo"])
def test_the_least_error_is_within_two_percent_of_the_exact_one(data, bits, scale_type):
    """Of 400 clips on the values themselves, or of all powers of two."""
    x = sample(data)
    spec = replace(MSE, bit_width=bits, scale_type=scale_type)
    qparams = observed(spec, *x.split(1000)).qparams()
    widest = observed(replace(spec, method="maxmin"), x).qparams().scale
    shares = (
        0.5 ** torch.arange(8) if scale_type == "poweroftwo" else torch.arange(1, 401) / 400
    )
    least = min(error(x, spec, widest * share) for share in shares)
    assert error(x, spec, qparams.scale) <= 1.02 * least


def sample(data):
    draw = torch.Generator().manual_seed(5)
    normal, uniform = (
        torch.randn(10_007, generator=draw),
        torch.rand(10_007, generator=draw) - 0.5,
    )
    outliers = torch.where(torch.arange(10_007) % 500 == 0, 30 * normal, normal)
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.49999))
    return {"normal": normal, "relu": normal.relu(), "laplace": laplace, "outliers": outliers}[
        data
    ]


def error(x, spec, scale):
    y = fake_quantize(
        x,
        scale,
        torch.zeros((), dtype=torch.int32),
        spec.quant_min,
        spec.quant_max,
        "half_even",
    )
    return (y - x).double().square().sum().item()


def test_a_batch_that_broke_off_leaves_no_trace():
    first, second, third = images(0).split(4)
    observer = observed(MSE, first, second)
    observer.forget_after(2)
    assert found(observer) == found(observed(MSE, first, second))
    observer.forget_after(1)
    observer.observe(third)
    assert found(observer) == found(observed(MSE, first, third))


@pytest.mark.parametrize("name", SPECS)
def test_a_stored_state_goes_on(name):
    first, second = images(1).split(6)
    restored = Observer(SPECS[name])
    restored.load_state_dict(observed(SPECS[name], first).state_dict())
    restored.observe(second)
    together = observed(SPECS[name], first, second)
    assert (
        restored.qparams().scale.flatten().tolist()
        == together.qparams().scale.flatten().tolist()
    )
    restored.load_state_dict(Observer(SPECS[name]).state_dict())
    with pytest.raises(UnobservedError):
        restored.qparams()


def test_the_state_is_a_histogram():
    state = observed(MSE, *images(2).split(3)).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "batches": (),
        "counts": (1, 2 * BINS),
        "exponent": (1,),
        "low": (1,),
        "high": (1,),
    }
    assert state["counts"].sum() == images(2).numel()
    for wrong in (
        {},
        {"batches": torch.zeros(3)},
        {"batches": torch.tensor(1), "counts": torch.zeros(3)},
    ):
        with pytest.raises(ValueError, match=r"state|tensors"):
            Observer(MSE).load_state_dict(wrong)


def test_nothing_but_zeros_gives_scale_one():
    assert observed(MSE, torch.zeros(3, 4), torch.zeros(2, 4)).qparams().scale == 1


def test_diffs_reads_values_and_cannot_be_pooled():
    with pytest.raises(ValueError, match="not pooled"):
        Observer(replace(MSE, method="diffs", scale_type="poweroftwo"))
