"""Sweeps of GPTQ and its kin: codes and scales that are adjusted after rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.roundings import CHANNELS, decaying, solved
from torch import Tensor

from quantizer.algorithms.gptq.algorithms import gptaq, gptq, qronos
from quantizer.algorithms.gptq.settings import (
    ColumnRounding,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
)
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import RoundedWeight, Run
from quantizer.layerwise.round_to_nearest import nearest

WEIGHT = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
X = decaying(512, 96, seed=1)
GROUPS = QuantizationSpec(bit_width=2, qscheme="per_group", ch_axis=1, group_size=32)
RUNS: dict[str, tuple[Run, ColumnRounding]] = {
    "gptq": (gptq, GPTQConfig()),
    "gptaq": (gptaq, GPTAQConfig()),
    "qronos": (qronos, QronosConfig()),
    "gptq, open groups": (gptq, GPTQConfig(desc_act=False, static_groups=False)),
    "gptq, searched scales": (gptq, GPTQConfig(scale_search=True)),
}
SPECS = {
    "channel": CHANNELS,
    "group": GROUPS,
    "negative scales": replace(GROUPS, symmetric_scale="quant_min"),
    "zero points": replace(GROUPS, symmetric=False),
    "group of rows": replace(GROUPS, ch_axis=0),
    "tensor": QuantizationSpec(bit_width=3),
    "powers of two": replace(CHANNELS, scale_type="poweroftwo"),
    "half up": replace(CHANNELS, round_mode="half_up"),
    "nvfp4": replace(GROUPS, dtype="fp4", group_size=16, scale_type="e4m3"),
}


def error_on_data(rounded: RoundedWeight) -> float:
    """The squared error of the outputs on the calibration data, as a share of their energy."""
    difference = (rounded.weight - WEIGHT) @ X.T
    energy = (WEIGHT @ X.T).square().sum()
    return float(difference.square().sum() / energy)


@pytest.mark.parametrize("name", RUNS)
def test_each_sweep_lowers_the_error(name: str) -> None:
    run, settings = RUNS[name]
    errors = []
    for sweeps in (0, 1, 3):
        rounded, _ = solved(WEIGHT, X, GROUPS, replace(settings, sweeps=sweeps), run)
        errors.append(rounded.after)
        assert rounded.after == pytest.approx(error_on_data(rounded), rel=1e-3)
    assert errors[2] < errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_keeps_its_codes_and_loses_nothing(name: str) -> None:
    spec = SPECS[name]
    # Little damping, so that the error that is lowered is the one on the data
    settings = GPTQConfig(damp_percent=1e-4)
    before, _ = solved(WEIGHT, X, spec, settings)
    after, found = solved(WEIGHT, X, spec, replace(settings, sweeps=2))
    again, _ = solved(WEIGHT, X, spec, replace(settings, sweeps=2))
    assert error_on_data(after) < error_on_data(before)
    assert torch.equal(nearest(after.weight, spec, after.qparams), after.weight)
    assert after.weight.numpy().tobytes() == again.weight.numpy().tobytes()
    assert not found.remarks


@pytest.mark.parametrize("name", ["channel", "group", "negative scales", "zero points"])
def test_scales_of_rows_are_fitted_to_their_codes(name: str) -> None:
    """A change of all scales in either direction makes the error larger."""
    spec = SPECS[name]
    settings = GPTQConfig(damp_percent=1e-4, sweeps=30)
    rounded, _ = solved(WEIGHT, X, spec, settings)
    least = error_on_data(rounded)
    for factor in (0.98, 1.02):
        assert error_on_data(replace(rounded, weight=factor * rounded.weight)) > least


def test_no_single_code_is_better_after_many_sweeps() -> None:
    spec = replace(CHANNELS, bit_width=2)
    settings = GPTQConfig(damp_percent=1e-6, sweeps=100)
    rounded, _ = solved(WEIGHT, X, spec, settings)
    gram = X.T @ X
    scale = rounded.qparams.scale[:, None]
    codes = (rounded.weight / scale).round()
    residual = (WEIGHT - rounded.weight) @ gram
    for step in (-1, 1):
        moved = codes + step
        has_code = (moved >= spec.quant_min) & (moved <= spec.quant_max)
        change: Tensor = step * scale * torch.ones_like(codes)
        rise = change.square() * gram.diagonal() - 2 * change * residual
        assert bool((rise[has_code] > -1e-3).all())
