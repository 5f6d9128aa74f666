"""The mse method: the least error among the scales that there can be, for both rules and for
powers of two.
"""

from dataclasses import replace

import pytest
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.metrics import sqnr_db
from quantizer.observers import Observer

NORMAL = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
POWER_OF_TWO = QuantizationSpec(scale_type="poweroftwo", method="mse")
CUTS = {
    "per_tensor": {},
    "per_channel": {"qscheme": "per_channel", "ch_axis": 0},
    "per_group": {"qscheme": "per_group", "ch_axis": 1, "group_size": 64},
}


def rounded(spec, x=NORMAL):
    observer = Observer(spec)
    observer.observe(x)
    qparams = observer.qparams()
    return quantize_tensor(x, spec, qparams.scale, qparams.zero_point)


def decibels(spec, x=NORMAL):
    return sqnr_db(x, rounded(spec, x))


@pytest.mark.parametrize(
    ("method", "expected"), [("maxmin", 34.87), ("mse", 40.56), ("diffs", 40.56)]
)
def test_the_best_power_of_two_of_normal_data(method, expected):
    """A float clip that is rounded up afterwards would equal maxmin."""
    assert decibels(replace(POWER_OF_TWO, method=method)) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_no_other_power_of_two_has_a_smaller_error(bits, cut, outlier):
    """Of all halvings of the scale, on the values themselves; the search sees them in 4096
    bins.
    """
    x = NORMAL.clone()
    x[:, 0] *= outlier
    spec = replace(POWER_OF_TWO, bit_width=bits, **CUTS[cut])
    observer = Observer(replace(spec, method="maxmin"))
    observer.observe(x)
    widest = observer.qparams()
    tried = [
        quantize_tensor(x, spec, widest.scale * 0.5**n, widest.zero_point) for n in range(10)
    ]
    rows = 1 if cut == "per_tensor" else len(x)
    least = (
        torch.stack([(each - x).view(rows, -1).square().sum(1) for each in tried]).amin(0).sum()
    )
    assert (rounded(spec, x) - x).square().sum() <= 1.01 * least


@pytest.mark.parametrize("mode", ["floor", "even", "ceil"])
def test_a_shared_exponent_is_the_best_of_its_neighbours(mode):
    spec = QuantizationSpec(
        "fp4", scale_type="e8m0", scale_mode=mode, method="mse", **CUTS["per_group"]
    )
    found = {method: decibels(replace(spec, method=method)) for method in ("maxmin", "mse")}
    assert found["mse"] >= found["maxmin"]
    assert found["mse"] == pytest.approx(19.0, abs=0.7)


@pytest.mark.parametrize(
    ("bits", "gain"), [(2, (1.4, 3.0)), (3, (1.1, 1.4)), (4, (0.4, 0.6)), (8, (-0.2, 0.1))]
)
def test_what_half_range_gains_on_normal_data(bits, gain):
    """256 x 256 normals; the more values a scale has, the less. At 8 bits nothing is gained."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for cut in CUTS.values():
        plain = QuantizationSpec(bit_width=bits, **cut)
        assert (
            gain[0]
            <= decibels(replace(plain, symmetric_scale="half_range"), x) - decibels(plain, x)
            <= gain[1]
        )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("cut", CUTS)
def test_the_search_over_ranges_knows_the_scales_of_both_rules(bits, cut):
    spec = QuantizationSpec(bit_width=bits, **CUTS[cut])
    rules = ("quant_max", "half_range")
    searched = [decibels(replace(spec, method="mse", symmetric_scale=rule)) for rule in rules]
    assert searched[1] == pytest.approx(searched[0], abs=0.1)
    assert (
        min(searched)
        >= max(decibels(replace(spec, symmetric_scale=rule)) for rule in rules) - 0.02
    )


def test_a_tensor_on_the_grid_of_quant_max_keeps_it():
    x = torch.tensor([7.0, -7.0, 3.0, 1.0, 0.0, -5.0]).repeat(50)
    spec = QuantizationSpec(bit_width=4, symmetric_scale="half_range", method="mse")
    assert torch.equal(rounded(spec, x), x)
