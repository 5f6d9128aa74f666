"""GPTQ: what the paper promises on inputs of known statistics, every qparams, and what it does
where the data fail.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extended import extended
from support.roundings import (
    CHANNELS,
    GROUPS,
    autoregressive,
    decaying,
    gain,
    independent,
    layer_names,
    linear,
    low_rank,
    remarks,
    resumed,
    solved,
    task_of,
    to_nearest,
    weight_of,
)
from torch import Tensor, nn

from quantizer.algorithms.gptq.algorithms import gptq
from quantizer.algorithms.gptq.settings import GPTQConfig
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.layerwise.adjustment import Adjustment
from quantizer.layerwise.gram import Gram
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams, output_error
from quantizer.numerics.codes import encode
from quantizer.numerics.formats import scale_bytes
from quantizer.numerics.qparams import QParams
from quantizer.numerics.two_level import pack_scales, unpack_scales
from quantizer.observers import NonFiniteError, ObservationError
from quantizer.sources.batches import Batch

PLAIN_ORDER = GPTQConfig(desc_act=False)
WEIGHT = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
EVERY_SPEC = {
    "tensor": QuantizationSpec(bit_width=4),
    "channel": CHANNELS,
    "channel, asymmetric": replace(CHANNELS, symmetric=False),
    "channel, half up": replace(CHANNELS, round_mode="half_up"),
    "input channel": replace(CHANNELS, ch_axis=1),
    "group": GROUPS,
    "group, symmetric": replace(GROUPS, symmetric=True),
    "group of rows": replace(GROUPS, ch_axis=0),
    "powers of two": replace(CHANNELS, scale_type="poweroftwo"),
    "fp8": QuantizationSpec("fp8_e4m3", qscheme="per_channel", ch_axis=0),
    "mxfp4": QuantizationSpec(
        "fp4", qscheme="per_group", ch_axis=1, group_size=32, scale_type="e8m0"
    ),
    "bfp16": QuantizationSpec(
        "bfp16", qscheme="per_group", ch_axis=1, group_size=8, scale_type="e8m0"
    ),
    "nvfp4": QuantizationSpec(
        "fp4", qscheme="per_group", ch_axis=1, group_size=16, scale_type="e4m3"
    ),
    "mx6": QuantizationSpec(
        "mx6", qscheme="per_group", ch_axis=1, group_size=16, scale_type="microexponent"
    ),
}


@pytest.mark.parametrize("spec", EVERY_SPEC.values(), ids=EVERY_SPEC)
@pytest.mark.parametrize("scale", [3.0, *extended(1.0)])
def test_uncorrelated_inputs_give_plain_rounding_bit_by_bit(
    spec: QuantizationSpec, scale: float
) -> None:
    """With H a multiple of I there is no error that another column could make up for."""
    x = scale * torch.eye(256)
    for damping in (0.0, 0.01):
        rounded, found = solved(WEIGHT, x, spec, GPTQConfig(damp_percent=damping))
        assert torch.equal(rounded.weight, to_nearest(WEIGHT, spec))
        assert rounded.before == rounded.after and not found.remarks


@pytest.mark.parametrize("bits", [3, 4])
def test_the_gain_grows_with_the_correlation_of_the_inputs(bits: int) -> None:
    """On other inputs of the same statistics; the gates of experiments with the paper's
    algorithm (section 3).
    """
    spec = replace(CHANNELS, bit_width=bits)
    for inputs, least in ((autoregressive, 3.0), (low_rank, 8.0), (decaying, 1.7)):
        rounded, _ = solved(WEIGHT, inputs(2048, 256, seed=1), spec, PLAIN_ORDER)
        assert gain(WEIGHT, rounded.weight, inputs(4096, 256, seed=2), spec) >= least


def test_independent_inputs_keep_plain_rounding() -> None:
    """There the errors on calibration data are smaller by chance, and on other data larger."""
    rounded, found = solved(WEIGHT, independent(2048, 256, seed=1), settings=PLAIN_ORDER)
    assert (
        torch.equal(rounded.weight, to_nearest(WEIGHT, CHANNELS))
        and rounded.after == rounded.before
    )
    (remark,) = found.remarks
    assert "promises no smaller errors" in remark.text and not remark.is_warning


def test_large_inputs_first_pays_on_few_sources_and_costs_on_neighbours() -> None:
    """E4c: `--act-order` of the paper's code."""
    for inputs, first_is_better, least in ((low_rank, True, 8.0), (autoregressive, False, 3.0)):
        calibration, others = inputs(2048, 256, seed=1), inputs(4096, 256, seed=2)
        ordered, unordered = (
            gain(
                WEIGHT, solved(WEIGHT, calibration, CHANNELS, each)[0].weight, others, CHANNELS
            )
            for each in (GPTQConfig(), PLAIN_ORDER)
        )
        assert (ordered > unordered) == first_is_better
        assert min(ordered, unordered) >= least


def test_six_weights_come_near_to_the_best_of_all_choices() -> None:
    """All ways to round six weights up or down, in the mean of 40 draws."""
    spec, errors = replace(CHANNELS, bit_width=4), []
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, 6, generator=draw)
        x = autoregressive(512, 6, seed)
        scale = nearest_qparams(spec, weight).scale
        low = (weight / scale).floor()
        choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=6)))
        best = (((low + choices) * scale - weight) @ x.T).square().sum(1).min()
        found, _ = solved(weight, x, spec, replace(PLAIN_ORDER, damp_percent=0.0))
        left = ((found.weight - weight) @ x.T).square().sum()
        errors.append(
            torch.stack(
                [left, best, ((to_nearest(weight, spec) - weight) @ x.T).square().sum()]
            )
        )
    left, best, plain = torch.stack(errors).mean(0)
    assert left <= 1.25 * best
    assert left <= 0.5 * plain


@pytest.mark.parametrize("spec", EVERY_SPEC.values(), ids=EVERY_SPEC)
def test_every_spec_gains_and_keeps_its_values(spec: QuantizationSpec) -> None:
    """A column with one scale of its own is a qparams like any other."""
    x = autoregressive(2048, 64, seed=1)
    rounded, found = solved(WEIGHT[:32, :64], x, spec)
    assert not found.remarks
    assert torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)
    assert gain(WEIGHT[:32, :64], rounded.weight, x, spec) > 1.5
    difference = rounded.weight - WEIGHT[:32, :64]
    error = (difference @ x.T).square().sum() / (WEIGHT[:32, :64] @ x.T).square().sum()
    assert rounded.after == pytest.approx(float(error), rel=1e-3)


def test_a_clear_gain_of_many_rows_is_told_from_some_of_them() -> None:
    """The figures are estimates then; the weights are those of every row by itself."""
    weight, x = (
        torch.cat([WEIGHT, WEIGHT.flip(1), WEIGHT.flip(0)])[:, :64],
        autoregressive(2048, 64, seed=1),
    )
    rounded, found = solved(weight, x)
    assert not found.remarks
    energy = (weight @ x.T).square().sum()
    plain, left = (
        ((weight - w) @ x.T).square().sum() / energy
        for w in (to_nearest(weight, CHANNELS), rounded.weight)
    )
    assert rounded.before == pytest.approx(float(plain), rel=0.05)
    assert rounded.after == pytest.approx(float(left), rel=0.05)
    alone, _ = solved(weight[100:228], x)
    assert torch.equal(rounded.weight[100:228], alone.weight)


def test_what_some_rows_do_not_show_is_asked_of_all() -> None:
    """Every other row is on its grid already, where nothing can be gained."""
    weight, x = torch.cat([WEIGHT, WEIGHT.flip(1)])[:, :64], autoregressive(2048, 64, seed=1)
    weight[::2] = to_nearest(weight, CHANNELS)[::2]
    rounded, found = solved(weight, x)
    assert not found.remarks and gain(weight, rounded.weight, x, CHANNELS) > 1.5
    errors = [
        ((weight - other) @ x.T).square().sum()
        for other in (to_nearest(weight, CHANNELS), rounded.weight)
    ]
    assert rounded.after / rounded.before == pytest.approx(
        float(errors[1] / errors[0]), rel=1e-3
    )


@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_found_on_the_way_fit_the_weights_as_they_are_then(
    group_size: int, symmetric: bool
) -> None:
    """static_groups off: other scales than those of the ranges, and no worse."""
    spec = replace(GROUPS, group_size=group_size, symmetric=symmetric)
    x = autoregressive(2048, 64, seed=1)
    weight = WEIGHT[:32, :64]
    moving, _ = solved(weight, x, spec, GPTQConfig(desc_act=False, static_groups=False))
    assert torch.equal(nearest(moving.weight, spec, moving.qparams), moving.weight)
    assert moving.qparams.scale.shape == nearest_qparams(spec, weight).scale.shape
    assert torch.equal(
        moving.qparams.scale[:, 0], nearest_qparams(spec, weight).scale[:, 0]
    )  # no error before the first
    assert gain(weight, moving.weight, x, spec) > 2
    if group_size == 16:
        assert not torch.equal(moving.qparams.scale, nearest_qparams(spec, weight).scale)


@pytest.mark.parametrize("by_size", [False, True])
def test_scales_found_on_the_way_are_those_of_the_papers_algorithm(by_size: bool) -> None:
    """Algorithm 1 as it is printed, in float64: all columns left take the error of each one
    before a group begins. A group begins with the first of its columns in any order.
    """
    spec, size = replace(GROUPS, group_size=16), 16
    x, weight = autoregressive(2048, 64, seed=1), WEIGHT[:32, :64]
    x = x * (1 + torch.arange(64) * 23 % 64)
    hessian = x.T.double() @ x.double()
    order = torch.arange(64)
    if by_size:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    left, hessian = weight.double()[:, order], hessian[order][:, order]
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(64)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    found = {}
    for column, place in enumerate(order.tolist()):
        group = order // size == place // size
        if place // size not in found:
            found[place // size] = nearest_qparams(spec, left[:, group].float())
        step = found[place // size]
        on = nearest(left[:, [column] * size].float(), spec, step)[:, 0].double()
        error = (left[:, column] - on) / inverse[column, column]
        left[:, column:] -= error[:, None] * inverse[column, column:]
    expected = torch.cat([found[group].scale for group in range(4)], 1)
    settings = GPTQConfig(desc_act=by_size, static_groups=False)
    moving, _ = solved(weight, x, spec, settings)
    assert torch.allclose(moving.qparams.scale, expected, rtol=1e-5)


def test_grids_that_were_found_before_are_used_as_they_are() -> None:
    """AWQ's clipped ranges, also with groups whose scales would be found on the way."""
    x, weight = autoregressive(2048, 64, seed=1), WEIGHT[:32, :64]
    task = task_of(linear(weight), torch.split(x, 512), GROUPS)
    (name,) = layer_names(task.graph)
    qparams = nearest_qparams(GROUPS, 0.8 * weight)
    for each in (GPTQConfig(), GPTQConfig(desc_act=False, static_groups=False)):
        found = gptq(task, each, Adjustment(qparams={name: qparams})).rounded[name]
        assert torch.equal(found.qparams.scale, qparams.scale)
        assert torch.equal(nearest(found.weight, GROUPS, qparams), found.weight)


def test_block_size_decides_on_speed_alone() -> None:
    """Blocks are about memory traffic (section 3.3, step 2)."""
    x = autoregressive(2048, 256, seed=1)
    found = [
        solved(WEIGHT, x, CHANNELS, GPTQConfig(block_size=size))[0]
        for size in (1, 100, 128, 4096)
    ]
    for each in found[1:]:
        assert each.after == pytest.approx(found[0].after, rel=0.01)


def test_two_runs_are_equal_to_the_last_bit() -> None:
    """Nothing is drawn."""
    x = decaying(2048, 256, seed=1)
    assert torch.equal(solved(WEIGHT, x)[0].weight, solved(WEIGHT, x)[0].weight)


class Branches(nn.Module):
    """Two layers that read one value, and one that reads what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(64, 96),
            nn.Linear(64, 96, bias=False),
            nn.Linear(96, 32),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A gated feed-forward part."""
        return self.down(torch.relu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@pytest.fixture
def branches() -> Branches:
    """Seeded."""
    torch.manual_seed(0)
    return Branches().eval()


def test_layers_that_read_one_value_are_solved_as_if_each_were_alone(
    branches: Branches,
) -> None:
    """One Hessian for both, and one solve for all their rows."""
    x = autoregressive(2048, 64, seed=1)
    task = task_of(branches, torch.split(x, 512), CHANNELS)
    found = gptq(task, GPTQConfig(), Adjustment())
    for name in layer_names(task.graph)[:2]:
        alone, _ = solved(weight_of(task.graph, name), x)
        assert found.rounded[name].after == pytest.approx(alone.after, rel=0.01)
        assert (
            found.rounded[name].weight - alone.weight
        ).abs().max() < 1.1 * alone.qparams.scale.max()


def test_a_layer_is_processed_on_inputs_that_rounded_layers_make(branches: Branches) -> None:
    """Section 3.3: the inputs of the partially quantized model."""
    x = autoregressive(2048, 64, seed=1)
    task = task_of(branches, torch.split(x, 512), CHANNELS)
    found = gptq(task, GPTQConfig(), Adjustment())
    gate, up, down = layer_names(task.graph)
    with torch.no_grad():
        hidden = torch.relu(x @ found.rounded[gate].weight.T + branches.gate.bias) * (
            x @ found.rounded[up].weight.T
        )
    alone, _ = solved(weight_of(task.graph, down), hidden)
    assert found.rounded[down].after == pytest.approx(alone.after, rel=0.01)


def test_the_float_model_stays_as_it_is(branches: Branches) -> None:
    """The network shares its memory until a weight is put in."""
    before = {name: value.clone() for name, value in branches.state_dict().items()}
    gptq(
        task_of(branches, [autoregressive(512, 64, seed=1)], CHANNELS),
        GPTQConfig(),
        Adjustment(),
    )
    assert all(
        torch.equal(before[name], value) for name, value in branches.state_dict().items()
    )


@pytest.mark.parametrize("true_sequential", [True, False])
def test_an_interrupted_run_goes_on_to_the_same_result(
    branches: Branches, true_sequential: bool
) -> None:
    """Task.done, after each number of groups."""
    model = nn.Sequential(branches, nn.ReLU(), nn.Linear(32, 8))
    states: list[Adjustment] = []
    task = task_of(model, torch.split(autoregressive(1024, 64, seed=1), 512), CHANNELS)
    task = replace(task, after_group=lambda found, done: states.append(found))
    whole = gptq(task, GPTQConfig(true_sequential=true_sequential), Adjustment())
    assert len(states) == len(task.structure.groups) == 3
    for done, state in enumerate(list(states), start=1):
        again = gptq(resumed(task, done), GPTQConfig(true_sequential=true_sequential), state)
        assert again.remarks == whole.remarks
        assert {name: each.after for name, each in again.rounded.items()} == {
            name: each.after for name, each in whole.rounded.items()
        }
        assert all(
            torch.equal(each.weight, whole.rounded[name].weight)
            for name, each in again.rounded.items()
        )


def test_without_true_sequential_a_block_is_gathered_before_it_changes(
    branches: Branches,
) -> None:
    """What goes on to the next block comes from the rounded block all the same."""
    torch.manual_seed(0)
    parts = [(Branches(), nn.Linear(32, 64)) for _ in range(2)]
    model = nn.Sequential(*(nn.Sequential(*part) for part in parts))
    x = autoregressive(2048, 64, seed=1)
    task = task_of(model, torch.split(x, 512), CHANNELS)
    assert len(task.structure.blocks) == 2
    found = gptq(task, GPTQConfig(true_sequential=False), Adjustment())
    names = layer_names(task.graph)
    branch, last = parts[0]
    with torch.no_grad():
        inside, _ = solved(
            weight_of(task.graph, names[2]), torch.relu(branch.gate(x)) * branch.up(x)
        )
        assert found.rounded[names[2]].after == pytest.approx(inside.after, rel=1e-4)
        for name, layer in zip(
            names[:4], (branch.gate, branch.up, branch.down, last), strict=True
        ):
            layer.weight.data = found.rounded[name].weight
        behind, _ = solved(weight_of(task.graph, names[4]), last(branch(x)))
    assert found.rounded[names[4]].after == pytest.approx(behind.after, rel=1e-4)


CONVOLUTIONS = {
    "plain": nn.Conv2d(8, 16, 3, padding=1, bias=False),
    "strided, grouped": nn.Conv2d(8, 16, 3, stride=2, groups=2, bias=False),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    "1d": nn.Conv1d(8, 16, 5, bias=False),
    "transposed": nn.ConvTranspose2d(8, 16, 2, stride=2, bias=False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_gain_on_smooth_images(name: str) -> None:
    """A position is a token, and a group of channels has a Gram matrix of its own."""
    torch.manual_seed(0)
    model = CONVOLUTIONS[name]
    model.reset_parameters()
    size = (4, 8, 200) if name == "1d" else (4, 8, 24, 24)
    images = torch.randn(size).cumsum(-1).cumsum(-2) / 8
    spec = replace(CHANNELS, ch_axis=int(name == "transposed"))
    task = task_of(model, torch.split(images, 2), spec)
    (layer,) = layer_names(task.graph)
    rounded = gptq(task, GPTQConfig(), Adjustment()).rounded[layer]
    assert torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)
    assert rounded.after < 0.8 * rounded.before
    with torch.no_grad():
        expected = model(images)
        model.weight.data = rounded.weight
        error = model(images) - expected
    assert float(error.square().sum() / expected.square().sum()) == pytest.approx(
        rounded.after, rel=1e-3
    )


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        (
            [3],
            "1 input channel was zero on the calibration data; its weights stay at "
            "round-to-nearest",
        ),
        (
            [3, 40],
            "2 input channels were zero on the calibration data; their weights stay at "
            "round-to-nearest",
        ),
    ],
)
def test_channels_that_were_zero_are_rounded_plainly(zero: list[int], said: str) -> None:
    """They may not be zero at run time, so their weights stay what they are (and are not set to
    zero).
    """
    x = autoregressive(2048, 64, seed=1)
    x[:, zero] = 0
    weight = WEIGHT[:32, :64]
    rounded, found = solved(weight, x)
    assert torch.equal(rounded.weight[:, zero], to_nearest(weight, CHANNELS)[:, zero])
    assert gain(weight, rounded.weight, x, CHANNELS) > 2
    assert [remark.text for remark in found.remarks] == [said]


def test_all_zeros_give_plain_rounding() -> None:
    """And no NaN."""
    rounded, found = solved(WEIGHT, torch.zeros(512, 256))
    assert torch.equal(rounded.weight, to_nearest(WEIGHT, CHANNELS))
    assert (rounded.before, rounded.after) == (0.0, 0.0)
    assert "256 input channels were zero" in found.remarks[0].text


def test_a_hessian_of_rank_one_is_damped_until_it_is_positive_definite() -> None:
    """Without damping it is singular; the paper's one percent is enough."""
    x = torch.randn(512, 1, generator=torch.Generator().manual_seed(0)) * torch.linspace(
        0.5, 2, 256
    )
    rounded, found = solved(WEIGHT, x, settings=GPTQConfig(damp_percent=0.0))
    assert rounded.weight.isfinite().all() and rounded.after < rounded.before
    (remark,) = found.remarks
    assert (
        remark.text
        == "its Hessian was not positive definite; 0.0001 of its mean diagonal was added"
        and remark.is_warning
    )
    rounded, found = solved(WEIGHT, x, settings=GPTQConfig(damp_percent=0.01))
    assert rounded.after < 1e-3 * rounded.before and not found.remarks


def test_what_no_damping_helps_is_rounded_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Gram matrix with a negative eigenvalue, as only an overflow or a broken accelerator
    could make it.
    """
    negative = torch.eye(256)[None].clone()
    negative[0, :2, :2] = torch.tensor([[1.0, 9.0], [9.0, 1.0]])
    monkeypatch.setattr(Gram, "matrix", property(lambda gram: negative))
    rounded, found = solved(WEIGHT, independent(64, 256, seed=0))
    assert torch.equal(rounded.weight, to_nearest(WEIGHT, CHANNELS))
    assert (
        "not positive definite even with damping 1; it stays at round-to-nearest"
        in found.remarks[0].text
    )


def test_a_layer_that_no_token_reached_is_left_out() -> None:
    """As an expert may be; calibration then rounds it to nearest."""
    task = task_of(linear(WEIGHT), [torch.zeros(2, 256)], CHANNELS)
    nothing = torch.zeros(0, 256)
    task = replace(task, batches=lambda: [Batch((nothing,), {}, None, nothing)])
    found = gptq(task, GPTQConfig(), Adjustment())
    assert not found.rounded
    assert [remark.text for remark in found.remarks] == [
        "no token of the calibration data reached it; it stays at round-to-nearest"
    ]


@pytest.mark.parametrize(
    ("bad", "text"), [(math.nan, "2 NaN and 0 infinite"), (math.inf, "0 NaN and 2 infinite")]
)
def test_values_that_are_not_finite_are_named_by_layer_and_batch(
    branches: Branches, bad: float, text: str
) -> None:
    """In the second of three batches."""
    x = autoregressive(1536, 64, seed=1)
    task = task_of(branches, torch.split(x, 512), CHANNELS)
    x[600, 3], x[601, 4] = bad, bad
    with pytest.raises(DataError) as error:
        gptq(task, GPTQConfig(), Adjustment())
    assert (
        error.value.message
        == f"batch 1: the input of {layer_names(task.graph)[0]} has {text} values"
    )


def test_a_weight_that_is_not_finite_is_an_error() -> None:
    """Checkpoints are checked when they are read; a model in memory is not."""
    weight = WEIGHT.clone()
    weight[3, 3] = math.nan
    with pytest.raises(DataError, match=r"the weight of .* has no range: 1 NaN"):
        solved(weight, independent(64, 256, seed=0))


def test_sums_beyond_float32_are_told_from_infinity() -> None:
    """Squares of large values overflow."""
    gram = Gram(nn.Linear(2, 1))
    with pytest.raises(ObservationError, match="as large as 1e\\+30"):
        gram.add(torch.tensor([[1e30, 0.0]]))
    with pytest.raises(NonFiniteError):
        Gram(nn.Linear(2, 1)).add(torch.tensor([[math.inf, 0.0]]))


def test_half_precision_weights_stay_on_their_grid() -> None:
    """The layer's own dtype, rounded in float32."""
    x = autoregressive(1024, 64, seed=1)
    weight = WEIGHT[:32, :64].bfloat16()
    task = task_of(linear(weight), torch.split(x.bfloat16(), 512), GROUPS)
    (rounded,) = gptq(task, GPTQConfig(), Adjustment()).rounded.values()
    assert rounded.weight.dtype == torch.bfloat16
    assert torch.equal(nearest(rounded.weight, GROUPS, rounded.qparams), rounded.weight)
    assert rounded.after < 0.5 * rounded.before


def test_weights_without_a_scale_are_no_business_of_it() -> None:
    """A cast has no qparams that errors could be moved on."""
    task = task_of(linear(WEIGHT), [independent(64, 256, seed=0)], QuantizationSpec("float16"))
    assert gptq(task, GPTQConfig(), Adjustment()) == Adjustment()


@st.composite
def layers(draw: st.DrawFn) -> tuple[Tensor, Tensor, QuantizationSpec, GPTQConfig]:
    """A weight with rows of any size, inputs with zeros and repetitions, a qparams and
    settings.
    """
    rows, depth = draw(st.integers(1, 5)), draw(st.sampled_from([4, 8, 36, 40]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(rows, depth, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    weight[draw(st.integers(0, rows - 1))] *= draw(st.sampled_from([0.0, 1.0, 1e-3]))
    rank, tokens = draw(st.integers(1, depth)), draw(st.sampled_from([1, 3, 200]))
    x = torch.randn(tokens, rank, generator=generator) @ torch.randn(
        rank, depth, generator=generator
    )
    x[:, draw(st.integers(0, depth - 1))] *= draw(st.sampled_from([0.0, 1.0, 1e3]))
    specs = [
        spec if spec.group_size is None else replace(spec, group_size=4)
        for spec in EVERY_SPEC.values()
        # Microexponents need groups of 16.
        if spec.scale_type != "microexponent"
    ]
    spec = draw(
        st.sampled_from(
            [spec for spec in specs if (spec.qscheme, spec.ch_axis) != ("per_group", 0)]
        )
    )
    dynamic = draw(st.booleans())
    damping = draw(st.sampled_from([0.0, 0.01, 1.0]))
    size = draw(st.sampled_from([1, 7, 128]))
    return (
        weight,
        x,
        spec,
        GPTQConfig(
            block_size=size,
            damp_percent=damping,
            desc_act=draw(st.booleans()),
            static_groups=not dynamic,
        ),
    )


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None)
@given(layers())
def test_whatever_comes_in_results_are_finite_on_the_grid_and_no_worse(
    case: tuple[Tensor, Tensor, QuantizationSpec, GPTQConfig],
) -> None:
    """Rounding again changes nothing, and round-to-nearest is the worst that comes out."""
    weight, x, spec, options = case
    rounded, _ = solved(weight, x, spec, options)
    assert rounded.weight.isfinite().all()
    assert torch.equal(nearest(rounded.weight, spec, rounded.qparams), rounded.weight)
    assert 0 <= rounded.after <= rounded.before
    gram = Gram(linear(weight))
    gram.add(x)
    left, plain = (
        output_error(gram.matrix, (weight - each)[None])
        for each in (rounded.weight, to_nearest(weight, spec))
    )
    assert left <= plain * (1 + 1e-3) + 1e-12 * output_error(gram.matrix, weight[None])


def test_a_group_that_is_given_scales_needs_no_range() -> None:
    """QParams of any shape that the spec has."""
    spec = replace(CHANNELS, bit_width=8)
    task = task_of(linear(WEIGHT), [decaying(512, 256, seed=0)], spec)
    (name,) = layer_names(task.graph)
    qparams = QParams(torch.full((128,), 0.05), torch.zeros(128, dtype=torch.int32))
    found = gptq(task, GPTQConfig(), Adjustment(qparams={name: qparams})).rounded[name]
    assert (
        found.qparams.scale is qparams.scale
        and remarks(gptq(task, GPTQConfig(), Adjustment())) == {}
    )


@pytest.mark.parametrize("qscheme", ["per_channel", "per_group"])
def test_rows_choose_between_the_scales_that_cut_half_a_step_and_those_that_do_not(
    qscheme: str,
) -> None:
    """What each row ends with is one of the two, and no row is worse than with the rule of the
    config alone.
    """
    cut = {"group_size": 64, "ch_axis": 1} if qscheme == "per_group" else {"ch_axis": 0}
    half = QuantizationSpec(bit_width=3, qscheme=qscheme, symmetric_scale="half_range", **cut)  # type: ignore[arg-type]
    x = autoregressive(2048, 256, seed=1)
    # The lower rows are on the grid that cuts nothing off
    weight = torch.cat([WEIGHT[:64], WEIGHT[64:].sign() * 0.3])
    rounded, _ = solved(weight, x, half, PLAIN_ORDER)
    scales = (
        nearest_qparams(half, weight).scale,
        nearest_qparams(replace(half, symmetric_scale="quant_max"), weight).scale,
    )
    wide = rounded.qparams.scale == scales[1]
    assert bool((wide | (rounded.qparams.scale == scales[0])).all())
    assert bool(wide[64:].all()) and not bool(wide[:64].all())
    assert torch.equal(nearest(rounded.weight, half, rounded.qparams), rounded.weight)
    plain, _ = solved(weight, x, replace(half, symmetric_scale="quant_max"), PLAIN_ORDER)
    others = autoregressive(4096, 256, seed=2)
    error = [
        float((others @ (each.weight - weight).T).square().sum()) for each in (rounded, plain)
    ]
    assert error[0] < error[1]


@pytest.mark.parametrize(
    ("name", "by_size"), [("nvfp4", False), ("mx6", True), ("mxfp4", False)]
)
def test_scales_found_on_the_way_are_those_that_one_tensor_can_have(
    name: str, by_size: bool
) -> None:
    """Each group's is found from what is left of its weights, and all are stored together."""
    spec = EVERY_SPEC[name]
    rounded, found = solved(
        WEIGHT,
        autoregressive(512, 256, seed=1),
        spec,
        GPTQConfig(desc_act=by_size, static_groups=False),
    )
    scale = rounded.qparams.scale
    packed = pack_scales(scale, spec.scale_type)
    assert sum(part.nbytes for part in packed.values()) == scale_bytes(
        spec.scale_type, scale.numel()
    )
    assert torch.equal(
        unpack_scales(packed["scale"], spec.scale_type, packed.get("global_scale")), scale
    )
    assert encode(rounded.weight, spec, scale, rounded.qparams.zero_point) is not None
    assert rounded.after < rounded.before and not found.remarks
