"""Numbers that vai_q_pytorch (pytorch_nndct 3.5.0, Vitis AI) gave for the same tensors,
observed by running it.

Where it is known to be wrong or not the best, the test says so and holds the better value
instead.
"""

from dataclasses import replace

import pytest
import torch
from support.positional import fake_quantize

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.metrics import sqnr_db
from quantizer.observers import Observer

FLOAT = QuantizationSpec()
NARROW = QuantizationSpec(narrow_range=True)
POWER_OF_TWO = QuantizationSpec(
    finest_position=12, scale_type="poweroftwo", round_mode="std_round", statistic="modal"
)


def tensors():
    generator = torch.Generator().manual_seed(1)
    randn = torch.randn(4096, generator=generator)
    relu = torch.relu(torch.randn(4096, generator=generator))
    return {"randn": randn, "relu": relu, "ramp": torch.arange(1, 4097) / 4096}


TENSORS = tensors()


def qparams(spec, x):
    observer = Observer(spec)
    observer.observe(x)
    return observer.qparams()


def scale(spec, x):
    return qparams(spec, x).scale.item()


@pytest.mark.parametrize(
    ("method", "randn", "relu", "ramp"),
    [
        ("maxmin", 0.03106703158, 0.02994241865, 0.007874015748),
        ("percentile", 0.0310518629, 0.02992779814, 0.007870171014),
        ("entropy", 0.03106703158, 0.02994241865, 0.007874015748),
    ],
)
def test_float_scales(method, randn, relu, ramp):
    found = [
        scale(replace(FLOAT, method=method), TENSORS[name])
        for name in ("randn", "relu", "ramp")
    ]
    assert found == pytest.approx([randn, relu, ramp], rel=1e-6)


def test_mse_scales_among_those_that_vai_q_pytorch_searches():
    """It scores magnitudes on 0..127: those are our codes when their range is narrow or the
    data are positive.
    """
    assert scale(replace(NARROW, method="mse"), TENSORS["randn"]) == pytest.approx(
        0.03058919381, rel=1e-6
    )
    assert scale(replace(FLOAT, method="mse"), TENSORS["relu"]) == pytest.approx(
        0.0297158046, rel=1e-6
    )


@pytest.mark.parametrize(
    ("name", "theirs"), [("randn", 0.03058919381), ("ramp", 0.007814422367)]
)
def test_mse_scales_are_better_where_its_search_stopped_short(name, theirs):
    """With the code -128, and with the maximum itself among the candidates, there are better
    scales than its own.
    """
    x, ours = TENSORS[name], scale(replace(FLOAT, method="mse"), TENSORS[name])
    sqnr = [
        sqnr_db(x, fake_quantize(x, torch.tensor(s), torch.tensor(0), -128, 127, "half_even"))
        for s in (ours, theirs)
    ]
    assert sqnr[0] > sqnr[1]


@pytest.mark.parametrize(("percentage", "amax"), [(99.0, 2.59116936), (99.9, 3.34058571)])
def test_percentiles(percentage, amax):
    found = scale(replace(FLOAT, method="percentile", percentage=percentage), TENSORS["randn"])
    assert found * 127 == pytest.approx(amax, rel=1e-6)


def test_the_hundredth_percentile_is_the_maximum():
    """vai_q_pytorch gives the left edge of the last bin, 3.94358659, and so clips what it was
    told to keep.
    """
    found = scale(replace(FLOAT, method="percentile", percentage=100.0), TENSORS["randn"])
    assert found * 127 == pytest.approx(TENSORS["randn"].abs().max().item(), rel=1e-6)


def test_other_codes_with_maxmin():
    x = TENSORS["randn"]
    asymmetric = qparams(replace(FLOAT, symmetric=False), x)
    assert asymmetric.scale.item() == pytest.approx(0.02882821139, rel=1e-6)
    assert asymmetric.zero_point.item() == 137
    assert scale(NARROW, x) == scale(FLOAT, x)
    assert scale(replace(FLOAT, bit_width=4), x) == pytest.approx(0.56364471572, rel=1e-6)


def test_an_asymmetric_range_is_extended_to_zero():
    """vai_q_pytorch neither extends the range nor clamps the zero point: relu + 1 gets -67."""
    assert qparams(replace(FLOAT, symmetric=False), TENSORS["relu"] + 1).zero_point.item() == 0


OUTLIER = torch.cat(
    [0.05 * torch.randn(999, generator=torch.Generator().manual_seed(0)), torch.tensor([8.0])]
)


@pytest.mark.parametrize(
    ("x", "maxmin", "diffs"),
    [
        (torch.linspace(-1, 1, 5), 6, 6),
        (torch.ones(4), 6, 6),
        (torch.zeros(4), 12, 12),
        (torch.tensor([-128.0, 127.0]), 0, 0),
        (torch.tensor([127.5]), 0, 0),
        (torch.tensor([-128.5]), 0, 0),
        (torch.tensor([200.0]), -1, -1),
        (OUTLIER, 3, 4),
    ],
)
def test_fix_positions(x, maxmin, diffs):
    assert scale(replace(POWER_OF_TWO, method="maxmin"), x) == 2.0**-maxmin
    assert scale(replace(POWER_OF_TWO, method="diffs"), x) == 2.0**-diffs


def test_fix_positions_at_four_bits():
    x = torch.relu(torch.randn(1000, generator=torch.Generator().manual_seed(5)))
    assert 1.875 < x.max() < 3.75  # 7.5 steps of a quarter, and of a half
    assert scale(replace(POWER_OF_TWO, method="maxmin", bit_width=4), x) == 0.5
    assert scale(replace(POWER_OF_TWO, method="diffs", bit_width=4), x) == 0.25


def test_per_channel():
    weights = torch.stack(
        [torch.linspace(-1, 0.5, 6), torch.linspace(-0.25, 2, 6), torch.full((6,), 0.01)]
    ).view(3, 2, 3)
    channels = {"qscheme": "per_channel", "ch_axis": 0}
    found = qparams(replace(FLOAT, **channels), weights).scale
    assert found.tolist() == pytest.approx([0.007874016, 0.015748031, 0.00007874], rel=1e-5)
    for method, positions in (("diffs", [7, 6, 12]), ("maxmin", [7, 5, 12])):
        found = qparams(replace(POWER_OF_TWO, method=method, **channels), weights).scale
        assert (-found.log2()).tolist() == positions
