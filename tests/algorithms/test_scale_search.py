"""Scales that GPTQ and its kin search before they round, and scales that may be negative."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.roundings import (
    CHANNELS,
    decaying,
    layer_names,
    linear,
    solved,
    task_of,
    to_nearest,
)
from torch import Tensor

from quantizer.algorithms.gptq.algorithms import gptaq, gptq, qronos
from quantizer.algorithms.gptq.settings import GPTAQConfig, GPTQConfig, QronosConfig
from quantizer.config.model import QuantizationSpec, SymmetricScale
from quantizer.layerwise.adjustment import Adjustment
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.numerics.qparams import QParams

WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
GROUPS = QuantizationSpec(bit_width=2, qscheme="per_group", ch_axis=1, group_size=32)
RULES: tuple[SymmetricScale, ...] = ("quant_max", "half_range", "quant_min")
ALGORITHMS = {
    "gptq": (gptq, GPTQConfig(scale_search=True)),
    "gptaq": (gptaq, GPTAQConfig(scale_search=True)),
    "qronos": (qronos, QronosConfig(scale_search=True)),
}


def held_out_error(weight: Tensor) -> float:
    """The squared error of the outputs on other inputs of the same statistics."""
    others = decaying(2048, 128, seed=2)
    return float(((weight - WEIGHT) @ others.T).square().sum())


def error_of(spec: QuantizationSpec, *, scale_search: bool) -> float:
    """That error with GPTQ."""
    x = decaying(1024, 128, seed=1)
    rounded, _ = solved(WEIGHT, x, spec, GPTQConfig(scale_search=scale_search))
    return held_out_error(rounded.weight)


@pytest.mark.parametrize("rule", RULES)
def test_searched_scales_pay_with_few_bits(rule: SymmetricScale) -> None:
    least_gains = {2: 1.1, 3: 1.02}
    for bits, least_gain in least_gains.items():
        spec = replace(GROUPS, bit_width=bits, symmetric_scale=rule)
        before = error_of(spec, scale_search=False)
        after = error_of(spec, scale_search=True)
        assert least_gain * after < before


def test_at_two_bits_a_scale_of_either_sign_is_better_than_the_other_rules() -> None:
    errors = {}
    for rule in RULES:
        spec = replace(GROUPS, symmetric_scale=rule)
        errors[rule] = error_of(spec, scale_search=True)
    assert 1.1 * errors["quant_min"] < min(errors["quant_max"], errors["half_range"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounding_again_changes_nothing_and_two_runs_give_equal_bytes(name: str) -> None:
    run, settings = ALGORITHMS[name]
    spec = replace(GROUPS, symmetric_scale="quant_min")
    x = decaying(1024, 128, seed=1)
    first, found = solved(WEIGHT, x, spec, settings, run)
    second, _ = solved(WEIGHT, x, spec, settings, run)
    assert first.weight.numpy().tobytes() == second.weight.numpy().tobytes()
    assert first.qparams.scale.numpy().tobytes() == second.qparams.scale.numpy().tobytes()
    assert torch.equal(nearest(first.weight, spec, first.qparams), first.weight)
    assert first.after < first.before and not found.remarks
    has_both_signs = (first.qparams.scale < 0).any() and (first.qparams.scale > 0).any()
    assert bool(has_both_signs)


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        replace(CHANNELS, symmetric_scale="quant_min"),
        replace(GROUPS, bit_width=4, symmetric=False),
        replace(GROUPS, dtype="fp4", group_size=16, scale_type="e4m3"),
        QuantizationSpec(bit_width=3),
    ],
    ids=["channel", "zero points", "nvfp4", "tensor"],
)
def test_any_spec_gains_over_round_to_nearest(spec: QuantizationSpec, desc_act: bool) -> None:
    settings = GPTQConfig(scale_search=True, desc_act=desc_act)
    rounded, _ = solved(WEIGHT, decaying(1024, 128, seed=1), spec, settings)
    assert held_out_error(rounded.weight) < held_out_error(to_nearest(WEIGHT, spec))
    assert torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)


def test_scales_that_an_earlier_algorithm_found_stay() -> None:
    task = task_of(linear(WEIGHT), [decaying(1024, 128, seed=1)], GROUPS)
    (name,) = layer_names(task.graph)
    scale = nearest_qparams(GROUPS, WEIGHT).scale / 2
    fixed = QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
    adjustment = Adjustment(qparams={name: fixed})
    found = gptq(task, GPTQConfig(scale_search=True), adjustment).rounded[name]
    assert torch.equal(found.qparams.scale, scale)


def test_inputs_that_were_always_zero_keep_their_weights() -> None:
    """Their groups are searched as if all inputs had one size, and no scale is zero."""
    x = decaying(1024, 128, seed=1)
    x[:, :32] = 0
    rounded, _ = solved(WEIGHT, x, GROUPS, GPTQConfig(scale_search=True))
    assert rounded.weight.isfinite().all()
    assert bool((rounded.qparams.scale > 0).all())
