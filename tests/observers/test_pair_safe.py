"""The pair_safe method: int8 weights whose products no x86 processor adds up wrong."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.integer import LARGEST_PAIR_SUM, largest_pair_sums
from quantizer.observers import Observer

PER_CHANNEL = QuantizationSpec(method="pair_safe", qscheme="per_channel", ch_axis=0)
ONE_SCALE = QuantizationSpec(method="pair_safe")
ROUND_MODES = ("half_even", "half_up", "half_down", "std_round")
SHAPES = st.sampled_from([(4, 2), (3, 7), (8, 3, 3, 3), (5, 4, 3), (2, 1, 5, 5), (16, 64)])


def scale_of(weight, spec):
    observer = Observer(spec)
    observer.observe(weight)
    return observer.qparams().scale


def pair_sums(weight, spec, scale):
    tensor = QuantizedTensor(spec, scale, torch.zeros_like(scale, dtype=torch.int32))
    codes = tensor.encoded(TensorQuantizer.of(tensor)(weight)).codes
    sums = largest_pair_sums(codes)
    if weight.dim() == 4 and weight.shape[1] == 3:
        # As a file pads images
        padded = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, 1))
        return torch.maximum(sums, largest_pair_sums(padded))
    return sums


def weights(seed, shape, power):
    """Weights between 0 and 1 of both signs, of which most are small for large powers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(*shape, generator=generator) * 2 - 1
    return x.sign() * x.abs() ** power


@given(
    seed=st.integers(0, 10_000),
    shape=SHAPES,
    power=st.sampled_from([0.2, 1.0, 5.0]),
    round_mode=st.sampled_from(ROUND_MODES),
    spec=st.sampled_from([PER_CHANNEL, ONE_SCALE]),
    size=st.sampled_from([1e-30, 1.0, 1e38]),
)
def test_no_two_neighbours_of_one_sign_exceed_128(seed, shape, power, round_mode, spec, size):
    spec = QuantizationSpec(**{**spec.to_json(), "round_mode": round_mode})
    weight = weights(seed, shape, power) * size
    sums = pair_sums(weight, spec, scale_of(weight, spec))
    assert int(sums.max()) <= LARGEST_PAIR_SUM


@given(seed=st.integers(0, 10_000), shape=SHAPES)
def test_a_scale_is_the_plain_one_or_has_a_pair_at_the_limit(seed, shape):
    weight = weights(seed, shape, 1.0)
    scale = scale_of(weight, PER_CHANNEL)
    plain = scale_of(weight, QuantizationSpec(qscheme="per_channel", ch_axis=0))
    sums = pair_sums(weight, PER_CHANNEL, scale)
    # Rounding takes at most one from the sum of two weights
    assert bool(((scale == plain) | (sums >= LARGEST_PAIR_SUM - 1)).all())
    assert bool((scale >= plain).all()) and bool((scale <= plain * 2).all())


def test_a_channel_of_zeros_has_the_scale_1():
    weight = torch.zeros(2, 4)
    weight[1] = 1.0
    scale = scale_of(weight, PER_CHANNEL)
    assert scale.tolist() == [1.0, scale[1].item()]
    assert 2 / 128 < scale[1] < 2 / 127.9


def test_pairs_of_a_convolution_are_neighbouring_channels_at_each_position():
    weight = torch.zeros(1, 2, 1, 2)
    # Neighbours in memory, at two positions of the kernel: their products are not added
    weight[0, 0] = 1.0
    plain = QuantizationSpec(qscheme="per_channel", ch_axis=0)
    assert scale_of(weight, PER_CHANNEL) == scale_of(weight, plain)
    weight[0, 1, 0, 0] = 1.0
    assert scale_of(weight, PER_CHANNEL) > scale_of(weight, plain)
