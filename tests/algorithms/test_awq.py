"""AWQ against its paper's claims: never worse than round-to-nearest, better with outliers, the
float function kept.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extended import extended
from support.rescaling import (
    A8,
    CASES,
    FAMILIES,
    W4,
    Outliers,
    built,
    difference,
    quantized_error,
    task_of,
)
from torch import Tensor, nn

from quantizer.algorithms.awq.awq import awq, least_step
from quantizer.algorithms.awq.settings import AWQConfig
from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig
from quantizer.algorithms.smoothquant.smoothquant import smoothquant
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.layerwise.adjustment import Adjustment, Task, apply_adjustment
from quantizer.layerwise.clip_search import ClipSearch, clip_shares, scale_errors
from quantizer.layerwise.gram import Gram
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.numerics.qparams import QParams

INT4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)
SPECS = {
    "uint4 groups": dataclasses.replace(W4, group_size=8),
    "int3 groups": QuantizationSpec(bit_width=3, qscheme="per_group", ch_axis=1, group_size=16),
    "int4 channels": INT4,
    "int8 tensor": QuantizationSpec(),
    "uint2 channels": QuantizationSpec(
        bit_width=2, signed=False, symmetric=False, qscheme="per_channel", ch_axis=0
    ),
    "int4 inputs": QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=1),
    "int4 groups of outputs": QuantizationSpec(
        bit_width=4, qscheme="per_group", ch_axis=0, group_size=4
    ),
    "mx fp4": QuantizationSpec(
        dtype="fp4", scale_type="e8m0", qscheme="per_group", ch_axis=1, group_size=32
    ),
    "nvfp4": QuantizationSpec(
        dtype="fp4", scale_type="e4m3", qscheme="per_group", ch_axis=1, group_size=8
    ),
    "mx6": QuantizationSpec(
        dtype="mx6", scale_type="microexponent", qscheme="per_group", ch_axis=1, group_size=16
    ),
    "fp8": QuantizationSpec(dtype="fp8_e4m3"),
    "powers of two": QuantizationSpec(
        bit_width=4, scale_type="poweroftwo", qscheme="per_channel", ch_axis=0
    ),
}


def solved(task: Task, found: Adjustment | None = None, **changes: bool) -> Adjustment:
    return awq(task, AWQConfig(**changes), found or Adjustment())  # type: ignore[arg-type]


def errors(task: Task, found: Adjustment, inputs: list[Tensor]) -> float:
    """Round-to-nearest's error over that of what was found."""
    plain = quantized_error(task, Adjustment(), inputs)
    return plain / quantized_error(task, found, inputs, rounded=True)


def model_with(gain: Tensor) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    model = Outliers(len(gain), outliers=0)
    model.norm.weight.data = gain
    return model, list(torch.randn(4, 2, 64, len(gain)))


def test_gains_of_the_paper() -> None:
    """Lin et al. 2023, tables 1 to 3: factors help where a few channels are large, and do no
    harm elsewhere.
    """
    torch.manual_seed(0)
    few = torch.ones(256)
    few[torch.randperm(256)[:6]] = 60.0
    inputs_by_kind = {
        "few": few,
        "lognormal": torch.exp(torch.randn(256)),
        "alike": torch.ones(256),
    }
    gains = {}
    exponents = {}
    for kind, gain in inputs_by_kind.items():
        model, inputs = model_with(gain)
        task = task_of(model, inputs, W4)
        found = solved(task, clip_search=False)
        gains[kind] = errors(task, found, inputs)
        factors = gain / next(
            (own["weight"] for own in found.parameters.values() if "bias" in own), gain
        )
        exponents[kind] = float(
            (factors[few > 1].median() / factors[few == 1].median()).log()
        ) / math.log(60)
    assert gains["few"] >= 3
    assert 0.3 <= exponents["few"] <= 0.6
    assert gains["lognormal"] >= 1.5
    assert 1 <= gains["alike"] <= 1.02


def test_clipping_helps_by_itself_and_with_factors() -> None:
    model, inputs = model_with(
        torch.exp(torch.randn(256, generator=torch.Generator().manual_seed(0)))
    )
    task = task_of(model, inputs, dataclasses.replace(W4, bit_width=3))
    both, clip, scale = (
        errors(task, solved(task, **off), inputs)
        for off in ({}, {"scale_search": False}, {"clip_search": False})
    )
    assert clip > 1.1
    assert scale > 1.1
    assert both > max(clip, scale)


@pytest.mark.parametrize("bits", [3, *extended(4)])
@pytest.mark.parametrize("signed", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("scheme", ["per_channel", "per_group"])
def test_one_large_channel(bits: int, signed: bool, scheme: str) -> None:
    """Factors pay on each qparams, so does clipping, and both together are no worse than one of
    them.
    """
    gain = torch.ones(128)
    gain[17] = 60.0
    model, inputs = model_with(gain)
    axis = {"ch_axis": 0} if scheme == "per_channel" else {"ch_axis": 1, "group_size": 32}
    spec = QuantizationSpec(
        bit_width=bits, signed=signed, symmetric=signed, qscheme=scheme, **axis
    )
    task, left = task_of(model, inputs, spec), []
    for off in ({}, {"clip_search": False}, {"scale_search": False}):
        found = solved(task, **off)
        assert errors(task, found, inputs) >= 2.5
        assert difference(task, found, inputs) < 1e-5
        assert bool(found.parameters) is ("scale_search" not in off)
        left.append(next(iter(found.rounded.values())).after)
    assert left[0] <= 1.01 * min(left)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", ["grouped", *extended("outliers")])
def test_any_spec(name: str, spec: QuantizationSpec) -> None:
    model, inputs = built(name)
    if name == "grouped" and spec.qscheme == "per_group" and spec.scales_per_group == 1:
        spec = dataclasses.replace(spec, group_size=-1)
    task = task_of(model, inputs, spec)
    found = solved(task)
    assert set(found.rounded) == set(found.qparams) == {layer for layer, _ in task.specs}
    graph = apply_adjustment(task.graph, found)
    for layer, rounded in found.rounded.items():
        assert rounded.qparams is found.qparams[layer]
        weight = graph.tensors[graph.by_name[layer].params["weight"]]
        assert torch.equal(nearest(weight, spec, rounded.qparams), rounded.weight)
        assert torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)
        assert 0 <= rounded.after < 1
        assert rounded.weight.isfinite().all()
    assert sum(each.after for each in found.rounded.values()) <= sum(
        each.before for each in found.rounded.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*(name for name in CASES if name not in FAMILIES), "Llama", *extended("GPT2", "Bert")],
)
def test_the_float_function_stays(name: str) -> None:
    """Also of grouped-query attention: Llama shares a head of values between two of queries.

    Factors of all families fold as SmoothQuant's do, which `test_smoothquant` looks at.
    """
    model, inputs = built(name)
    task = task_of(model, inputs, INT4)
    found = solved(task)
    assert found.rounded
    assert bool(found.parameters) is (name != "gated")  # its inputs are alike in size
    assert difference(task, found, inputs) < 1e-5


def test_a_group_is_never_worse_than_plain_rounding() -> None:
    model, inputs = built("outliers")
    task = task_of(model, inputs, dataclasses.replace(W4, group_size=16))
    found = solved(task, clip_search=False)
    assert len(found.rounded) == 2
    assert sum(row.after for row in found.rounded.values()) <= sum(
        row.before for row in found.rounded.values()
    )


@pytest.mark.parametrize(
    "spec", [dataclasses.replace(INT4, qscheme="per_group", ch_axis=1, group_size=8), INT4]
)
def test_a_convolution_of_correlated_inputs_is_never_worse(spec: QuantizationSpec) -> None:
    """Also where a scale has inputs of several places, so that its own error is known but
    roughly.
    """
    for seed in range(12):
        torch.manual_seed(seed)
        layer, images = nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(2, 2, 8, 24, 24)
        task = task_of(layer, list(images.cumsum(-1).cumsum(-2) / 8), spec)
        [rounded] = solved(task).rounded.values()
        assert rounded.after <= rounded.before


def test_errors_before_and_after_are_those_of_the_layers_outputs() -> None:
    model, inputs = model_with(torch.exp(torch.linspace(-2, 2, 256)))
    task = task_of(model, inputs, W4)
    found = solved(task)
    [(layer, rounded)] = found.rounded.items()
    with torch.no_grad():
        x = torch.cat([model.norm(x).flatten(0, 1) for x in inputs])
        weight = model.layers[0].weight
        scaled = found.parameters[layer]["weight"]
        factors = (scaled / weight).nanmedian(0).values
        energy = (x @ weight.T).square().sum()
        before = (
            (x @ (nearest(weight, W4, nearest_qparams(W4, weight)) - weight).T).square().sum()
        )
        after = ((x / factors) @ (rounded.weight - scaled).T).square().sum()
    assert rounded.before == pytest.approx(float(before / energy), rel=1e-3)
    assert rounded.after == pytest.approx(float(after / energy), rel=1e-3)


def test_after_smoothquant() -> None:
    model, inputs = built("gated")
    task = task_of(model, inputs, INT4, A8)
    found = smoothquant(task, SmoothQuantConfig(alpha="auto"), Adjustment())
    both = solved(task, found)
    assert difference(task, both, inputs) < 1e-5
    assert len(both.insertions) == len(found.insertions) == 1, (
        "one multiplication takes both factors"
    )
    assert set(both.rounded) == {layer for layer, role in task.specs if role == "weights"}


def test_what_is_rescaled_later_is_not_rounded_any_more() -> None:
    model, inputs = built("outliers")
    task = task_of(model, inputs, INT4)
    found = smoothquant(task, SmoothQuantConfig(alpha=0.5), solved(task))
    assert not found.rounded
    assert not found.qparams


@pytest.mark.slow
def test_two_runs_and_a_resumed_one_leave_the_same_bits() -> None:
    model, inputs = built("Llama")
    states: list[tuple[Adjustment, int]] = []
    task = task_of(
        model, inputs, INT4, after_group=lambda found, done: states.append((found, done))
    )
    whole = solved(task)
    assert states[-1] == (whole, len(task.structure.groups))
    assert len(states) > 3
    for found, done in states:
        resumed = solved(
            dataclasses.replace(task, done=done, after_group=lambda found, done: None), found
        )
        assert resumed.rounded.keys() == whole.rounded.keys()
        for layer, rounded in whole.rounded.items():
            assert torch.equal(resumed.rounded[layer].weight, rounded.weight)
            assert torch.equal(resumed.qparams[layer].scale, whole.qparams[layer].scale)
            assert resumed.rounded[layer].after == rounded.after
        for layer, own in whole.parameters.items():
            assert all(
                torch.equal(resumed.parameters[layer][key], value) for key, value in own.items()
            )


class Routed(nn.Module):
    """An expert that only large first values reach."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.where(x[:, 0] > 100)
        return self.always(x).index_add(0, rows, self.seldom(x[rows]))


def test_an_expert_that_no_token_reaches_is_rounded_plainly() -> None:
    torch.manual_seed(0)
    inputs = list(torch.randn(2, 5, 8))
    task = task_of(Routed(), inputs, INT4)
    found = solved(task)
    [layer] = found.rounded
    assert "always" in layer
    [remark] = found.remarks
    assert "seldom" in remark.layer
    assert "no token" in remark.text
    assert remark.is_warning


def test_dead_channels_are_told_and_keep_their_weights() -> None:
    model, inputs = built("outliers")
    model.norm.weight.data[3] = model.norm.bias.data[3] = 0
    task = task_of(model, inputs, INT4)
    found = solved(task)
    assert all(
        "1 input channel was zero" in remark.text
        for remark in found.remarks
        if remark.is_warning
    )
    assert any(remark.is_warning for remark in found.remarks)
    weights = [
        found.parameters[layer]["weight"]
        for layer in found.rounded
        if layer in found.parameters
    ]
    for weight, layer in zip(weights, model.layers, strict=True):
        assert torch.equal(weight[:, 3], layer.weight[:, 3])


def test_what_is_not_finite_is_an_error_that_names_it() -> None:
    model, inputs = built("outliers")
    task = task_of(model, inputs, INT4)
    inputs[1] = torch.full_like(inputs[1], float("inf"))
    with pytest.raises(DataError, match=r"batch 1: the input of .* has \d+ NaN"):
        solved(task)
    model.layers[1].weight.data[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"weight of .*1.* has no range"):
        solved(task_of(model, inputs[:1], INT4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = Outliers(64, layers=2).to(dtype), list(torch.randn(2, 4, 64).to(dtype))
    task = task_of(model, inputs, INT4)
    found = solved(task)
    assert found.parameters
    assert difference(task, found, inputs) == 0
    assert all(rounded.weight.dtype == dtype for rounded in found.rounded.values())


@settings(max_examples=20)
@given(st.sampled_from(sorted(SPECS)), st.integers(0, 1000))
def test_errors_of_scales_add_up(name: str, seed: int) -> None:
    """With inputs that do not correlate, the errors of all scales are the error of the
    outputs.
    """
    torch.manual_seed(seed)
    spec, layer = SPECS[name], nn.Linear(32, 12)
    gram = torch.diag(torch.rand(32) + 0.1)[None]
    weight = layer.weight.detach()
    lost = nearest(weight, spec, nearest_qparams(spec, weight)) - weight
    found = scale_errors(layer, spec, lost, gram)
    assert found.shape == nearest_qparams(spec, weight).scale.shape
    assert float(found.sum()) == pytest.approx(float(((lost @ gram[0]) * lost).sum()), rel=1e-4)


def test_a_clipped_grid_is_the_best_of_its_candidates() -> None:
    """By the outputs themselves, row by row."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 6), torch.randn(100, 16) @ torch.randn(16, 16)
    gram = Gram(layer)
    gram.add(x)
    weight = layer.weight.detach()
    found = ClipSearch(layer, INT4, weight, gram.matrix, shares=clip_shares(INT4)).qparams
    qparams = nearest_qparams(INT4, weight)
    best = torch.full((6,), float("inf"))
    for step in range(11):
        tried = nearest(
            weight, INT4, QParams(qparams.scale * (1 - step / 20), qparams.zero_point)
        )
        best = torch.minimum(best, (x @ (tried - weight).T).square().sum(0))
    have = (x @ (nearest(weight, INT4, found) - weight).T).square().sum(0)
    assert torch.allclose(have, best, rtol=1e-3)


def test_a_clipped_grid_knows_the_scale_that_cuts_nothing_off() -> None:
    """Weights on the grid of quant_max stay as they are, whatever the rule of the config."""
    half = replace(INT4, symmetric=True, symmetric_scale="half_range")
    layer, weight = nn.Linear(16, 2), torch.tensor([7.0, -7.0, 3.0, 1.0] * 4).repeat(2, 1)
    found = ClipSearch(
        layer, half, weight, torch.eye(16)[None], shares=clip_shares(half)
    ).qparams
    assert torch.equal(nearest(weight, half, found), weight)


def test_a_clipped_grid_knows_the_exponent_that_cuts_nothing_off() -> None:
    """The rule of MX (OCP, section 6.3) gives 7.9 the scale 1, and fp4 ends at 6. With the
    scale 2, 7.9 becomes 8.
    """
    mx = QuantizationSpec(
        dtype="fp4", scale_type="e8m0", qscheme="per_group", ch_axis=1, group_size=32
    )
    layer, weight = nn.Linear(32, 2), torch.full((2, 32), 7.9)
    assert nearest_qparams(mx, weight).scale.unique().tolist() == [1.0]
    found = ClipSearch(layer, mx, weight, torch.eye(32)[None], shares=clip_shares(mx)).qparams
    assert found.scale.unique().tolist() == [2.0]


@given(st.integers(1, 60), st.data())
def test_the_least_step_of_a_valley_is_found(steps: int, data: st.DataObject) -> None:
    bottom = data.draw(st.integers(0, steps))
    assert abs(least_step(lambda step: abs(step - bottom), steps) - bottom) <= 1
