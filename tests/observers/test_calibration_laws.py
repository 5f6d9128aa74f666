"""What theory and published tables say about the scales the methods find."""

import pytest
import torch
from support.positional import fake_quantize

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.metrics import sqnr_db
from quantizer.numerics.rounding import NEAREST, ROUND_MODES
from quantizer.observers import Observer


def gauss(n, seed=5):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def probabilities(n):
    """The quantiles at these are the distribution itself, without the luck of a draw."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def scale(x, **fields):
    observer = Observer(QuantizationSpec(**fields))
    observer.observe(x)
    return observer.qparams().scale


def sqnr(x, step, bits=8):
    return sqnr_db(
        x,
        fake_quantize(
            x, step, torch.tensor(0), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, "half_even"
        ),
    )


@pytest.mark.parametrize(
    ("bits", "clip", "decibel"),
    [(2, 1.03, 8.26), (3, 1.83, 13.90), (4, 2.37, 19.24), (8, 3.86, 40.74)],
)
def test_mse_finds_the_best_clip_of_gaussian_data(bits, clip, decibel):
    """Clip = scale * (2^(b-1) - 1) in sigma. Max (1960) has 19.4 dB for the best uniform
    16-level quantizer.
    """
    x = torch.special.ndtri(probabilities(100_000)).float()
    step = scale(x, method="mse", bit_width=bits)
    assert step.item() * (2 ** (bits - 1) - 1) == pytest.approx(clip, rel=0.05)
    assert sqnr(x, step, bits) == pytest.approx(decibel, abs=0.15)


def test_mse_finds_the_best_clip_of_laplacian_data():
    half = -torch.log(probabilities(100_000)).float()
    x = torch.cat([half, -half])
    assert scale(x, method="mse", bit_width=4).item() * 7 == pytest.approx(4.60, rel=0.07)


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_no_scale_is_much_better_than_that_of_mse(bits, round_mode):
    """Tried on the values themselves, half of which lie on half-way points of some of the
    scales.

    Those are left out for floor, which takes a value on a code and its lower neighbour a step
    apart: no histogram sees that.
    """
    values = gauss(20_000)
    x = torch.cat([values, (values * 8).round() / 8]) if round_mode in NEAREST else values
    best = scale(x, method="mse", bit_width=bits, round_mode=round_mode)
    bounds = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    sqnrs = [
        sqnr_db(x, fake_quantize(x, best * factor, torch.tensor(0), *bounds, round_mode))
        for factor in [1.0, *torch.linspace(0.5, 2, 60).tolist()]
    ]
    assert sqnrs[0] >= max(sqnrs) - 0.3


def test_percentile_keeps_the_bulk_when_there_are_outliers():
    """A fraction 1e-4 at 50 to 60 sigma."""
    bulk = gauss(1_000_000)
    x = torch.cat([bulk, 50 + 10 * torch.rand(100, generator=torch.Generator().manual_seed(1))])
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(2))]
    with_maximum = sqnr(bulk, scale(x, method="maxmin"))
    assert sqnr(bulk, scale(x, method="percentile", percentage=99.9)) >= with_maximum + 15


def test_percentile_costs_little_on_clean_data():
    x = gauss(1_000_000)
    with_maximum = sqnr(x, scale(x, method="maxmin"))
    assert sqnr(x, scale(x, method="percentile", percentage=99.99)) >= with_maximum - 0.5
    assert sqnr(x, scale(x, method="percentile", percentage=99.0)) <= with_maximum - 8


def test_entropy_cuts_off_outliers_and_keeps_clean_data():
    bulk = gauss(100_000).abs()
    assert scale(bulk, method="entropy").item() * 127 > 0.6 * bulk.max()
    x = torch.cat([bulk, torch.tensor([20.0])])
    assert scale(x, method="entropy").item() * 127 < 10


def test_diffs_gives_the_least_error_of_its_five_scales():
    x = gauss(20_000)
    for bits in range(2, 9):
        fields = {"bit_width": bits, "scale_type": "poweroftwo"}
        coarsest = scale(x, method="maxmin", **fields)
        errors = {sqnr(x, coarsest / 2**k, bits): coarsest / 2**k for k in range(5)}
        assert scale(x, method="diffs", **fields) == errors[max(errors)]
