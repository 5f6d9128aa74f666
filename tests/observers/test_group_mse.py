"""The group_mse method: a range for each group, with the better of two zero points."""

from dataclasses import replace

import pytest
import torch

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.metrics import sqnr_db
from quantizer.observers import Observer

NORMAL = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
GROUPS = QuantizationSpec(
    method="group_mse",
    qscheme="per_group",
    ch_axis=1,
    group_size=32,
    symmetric_scale="half_range",
)


def observed(spec, x=NORMAL):
    observer = Observer(spec)
    observer.observe(x)
    return observer.qparams()


def rounded(spec, x=NORMAL):
    qparams = observed(spec, x)
    return quantize_tensor(x, spec, qparams.scale, qparams.zero_point)


def group_errors(spec):
    return (rounded(spec) - NORMAL).square().unflatten(1, (-1, 32)).sum(2)


@pytest.mark.parametrize(
    ("bits", "symmetric", "least_gain"),
    [(4, False, 0.3), (5, False, 0.2), (4, True, 0.7), (5, True, 0.55), (2, True, 1.0)],
)
def test_it_gains_on_normal_data(bits, symmetric, least_gain):
    spec = replace(GROUPS, bit_width=bits, symmetric=symmetric)
    maxmin = replace(spec, method="maxmin")
    gain = sqnr_db(NORMAL, rounded(spec)) - sqnr_db(NORMAL, rounded(maxmin))
    assert gain >= least_gain
    assert (group_errors(spec) <= group_errors(maxmin) * 1.000001).all()


@pytest.mark.parametrize("bits", [4, 5])
def test_zero_points_are_codes(bits):
    spec = replace(GROUPS, bit_width=bits, symmetric=False)
    for shift in (-10.0, 0.0, 10.0):
        zero_point = observed(spec, NORMAL + shift).zero_point
        assert zero_point.min() >= 0
        assert zero_point.max() < 1 << bits


def test_values_that_are_codes_stay():
    codes = torch.arange(16.0).repeat(4, 2)
    spec = replace(GROUPS, bit_width=4, symmetric=False)
    x = (codes - 5) * 0.25
    assert torch.equal(rounded(spec, x), x)
    assert torch.equal(rounded(spec, torch.zeros(4, 32)), torch.zeros(4, 32))


def test_narrow_dtypes_are_read_as_they_are():
    spec = replace(GROUPS, bit_width=4, symmetric=False)
    x = NORMAL.bfloat16()
    assert torch.equal(observed(spec, x).scale, observed(spec, x.float()).scale)


def test_it_cannot_read_all_batches_together():
    with pytest.raises(ValueError, match="group_mse method reads each batch's values"):
        Observer(replace(GROUPS, statistic=POOLED))


@pytest.mark.parametrize(
    ("name", "bits", "symmetric", "most_lost"),
    [
        ("Q4_0", 4, True, 0.15),
        ("Q5_0", 5, True, 0.06),
        ("Q4_1", 4, False, 0.0),
        ("Q5_1", 5, False, 0.05),
    ],
)
def test_it_is_as_good_as_the_reference_of_gguf(name, bits, symmetric, most_lost):
    """The reference has scales of either sign, or minima that are not multiples of the scale."""
    quants = pytest.importorskip("gguf.quants", reason="needs quantizer-torch[llm]")
    kind = getattr(quants.GGMLQuantizationType, name)
    stored = quants.quantize(NORMAL.numpy(), kind)
    reference = torch.from_numpy(quants.dequantize(stored, kind)).view(NORMAL.shape)
    ours = sqnr_db(NORMAL, rounded(replace(GROUPS, bit_width=bits, symmetric=symmetric)))
    assert ours >= sqnr_db(NORMAL, reference) - most_lost
