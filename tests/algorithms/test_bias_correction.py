"""Bias correction gives every layer its float mean back, exactly, or to half a step of the
DPU's scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import ROLES, config, document, layer
from support.corrections import Corrected, corrected
from support.extended import extended
from support.toys import built, traced
from torch import Tensor, nn

import quantizer
from quantizer.algorithms.bias_correction.bias_correction import output_steps
from quantizer.calibration.solution import quantized_network
from quantizer.calibration.statistics import ChannelMean
from quantizer.errors import DataError
from quantizer.graph.tracing.trace import trace
from quantizer.sources.batches import Batch

EXAMPLES = Path(__file__).parents[2] / "examples"
WEIGHTS_ONLY: dict[str, Any] = {"include_bias_corr": True, "quantizable_data_type": ["weights"]}


def weights(
    bit_width: int, *layers: dict[str, Any], per_channel: bool = False
) -> dict[str, Any]:
    """A config that quantizes the weights alone."""
    return document(
        *layers,
        tensor={"weights": {"bit_width": bit_width, "per_channel": per_channel}},
        **WEIGHTS_ONLY,
    )


def dpu(*roles: str) -> dict[str, Any]:
    """A config of the DPU."""
    keys = {
        "narrow_range": True,
        "scale_type": "poweroftwo",
        "method": "diffs",
        "calib_statistic_method": "modal",
    }
    half_up = {"activation": {"round_mode": "half_up"}}
    given = list(roles or ROLES)
    return document(
        overall={**keys, "round_mode": "std_round"},
        tensor=half_up if "activation" in given else {},
        target_device="DPU",
        include_bias_corr=True,
        quantizable_data_type=given,
    )


def of_toy(folder: Path, name: str, content: dict[str, Any]) -> Corrected:
    """A toy on two batches of its own."""
    batches = [Batch(*built(name).call(size), None, None) for size in (2, 3)]
    return corrected(traced(name), config(folder, content), batches)


TOYS = [
    "residual",
    "mobile",
    "transposed",
    "branches",
    "tied",
    "reused",
    *extended("containers", "attention"),
]


@pytest.mark.parametrize("name", TOYS)
def test_the_mean_shift_falls_to_the_noise_of_float_arithmetic(
    name: str, tmp_path: Path
) -> None:
    found = of_toy(tmp_path, name, weights(4))
    assert found.mean_shift(found.before) > 1e-3
    assert found.mean_shift(found.before) >= 1e4 * found.mean_shift(found.after)


class Layers(nn.Module):
    """One of each: no bias, grouped, transposed, one and three dimensions, linear on three
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(4, 6, 3, groups=2, bias=False)
        self.up1d = nn.ConvTranspose1d(6, 5, 2, stride=2, bias=False)
        self.linear = nn.Linear(12, 12, bias=False)
        self.up2d = nn.ConvTranspose2d(5, 6, 3, groups=1)
        self.conv3d = nn.Conv3d(6, 3, (1, 2, 2))
        self.up3d = nn.ConvTranspose3d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(torch.relu(self.up1d(torch.relu(self.conv1d(x)))))
        x = torch.relu(self.up2d(x.unsqueeze(2)))
        y: Tensor = self.up3d(torch.relu(self.conv3d(x.unsqueeze(2))))
        return y


def test_every_kind_of_layer_is_corrected_on_its_own_channels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = (
        Layers().eval(),
        [Batch((torch.randn(size, 4, 8),), {}, None, None) for size in (2, 5)],
    )
    found = corrected(trace(model, batches[0].args), config(tmp_path, weights(3)), batches)
    shapes = {
        name.rpartition("/")[2]: tuple(shift.shape)
        for name, shift in found.shifts(found.after).items()
    }
    assert shapes == {
        "conv1d": (6,),
        "conv_transpose1d": (5,),
        "linear": (12,),
        "conv_transpose2d": (6,),
        "conv3d": (3,),
        "conv_transpose3d": (2,),
    }
    for name, shift in found.shifts(found.after).items():
        assert shift.abs().max() < 1e-6, name
        assert found.shifts(found.before)[name].abs().max() > 1e-3, name


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    channels=st.integers(1, 4),
    shape=st.lists(st.integers(1, 4), max_size=2),
)
def test_a_channel_mean_is_that_of_all_values_at_once(
    sizes: list[int], channels: int, shape: list[int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, channels, *shape, generator=draw) for size in sizes]
    found = ChannelMean(ch_axis=-1 - len(shape))
    for batch in batches:
        found.observe(batch)
    everything = torch.cat(batches).double().movedim(1, 0).flatten(1).mean(1)
    assert torch.allclose(found.mean(), everything, rtol=0, atol=1e-6)


def test_half_precision_is_summed_in_single(tmp_path: Path) -> None:
    found = ChannelMean(ch_axis=-1)
    found.observe(torch.full((70000, 1), 1.0, dtype=torch.float16))
    assert found.mean().item() == 1.0


def test_a_linear_layers_correction_is_what_the_weights_error_makes_of_the_mean_input(
    tmp_path: Path,
) -> None:
    """E[Wx] - E[W_q x] = (W - W_q) E[x]: Nagel et al. 2019, equation 16."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4).eval(), torch.randn(50, 6) + 1
    found = corrected(
        trace(model, (x,)), config(tmp_path, weights(3)), [Batch((x,), {}, None, None)]
    )
    name = "Linear::Linear/linear"
    rounded = quantized_network(found.graph, found.before).layers[name].get_parameter("weight")
    expected = (model.weight - rounded) @ x.mean(0)
    assert torch.allclose(found.after.corrections[name], expected, rtol=0, atol=1e-6)


@pytest.fixture
def digits_mobile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits_mobile

    yield digits_mobile
    for name in ("digits_mobile", "digits"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bit_width", "per_channel", "gain"), [(4, False, 0.05), (3, False, 0.15), (3, True, 0.15)]
)
def test_a_depthwise_net_wins_its_accuracy_back(
    bit_width: int, per_channel: bool, gain: float, digits_mobile: Any, tmp_path: Path
) -> None:
    """The claim of Nagel et al. 2019, table 3, on the example: measured 59.4 to 95.0, 9.0 to
    55.0, 22.2 to 92.4 %.
    """
    model = digits_mobile.model().eval()
    batches = [
        Batch((images,), {}, labels, None)
        for images, labels in digits_mobile.calibration_data()
    ]
    content = weights(bit_width, per_channel=per_channel)
    found = corrected(trace(model, batches[0].args), config(tmp_path, content), batches)
    assert found.mean_shift(found.before) >= 1e4 * found.mean_shift(found.after)

    def top1(solution: Any) -> float:
        with torch.no_grad():
            network = quantized_network(found.graph, solution)
            return float(
                digits_mobile.evaluate(network, digits_mobile.evaluation_data())["top1"]
            )

    assert top1(found.after) >= top1(found.before) + gain


@pytest.mark.parametrize("name", ["residual", "mobile", "transposed"])
def test_nothing_is_lost_when_the_bias_itself_has_few_bits(name: str, tmp_path: Path) -> None:
    few = document(
        tensor={"bias": {"bit_width": 3}},
        **WEIGHTS_ONLY | {"quantizable_data_type": ["weights", "bias"]},
    )
    found = of_toy(tmp_path, name, few)
    assert found.mean_shift(found.before) >= 1e4 * found.mean_shift(found.after)


@pytest.mark.parametrize("name", ["residual", "mobile", "transposed"])
def test_the_dpus_biases_stay_codes_and_at_most_half_a_step_is_left(
    name: str, tmp_path: Path
) -> None:
    found = of_toy(tmp_path, name, dpu("weights", "bias"))
    network = quantized_network(found.graph, found.after)
    assert any(correction.any() for correction in found.after.corrections.values())
    for layer_name, shift in found.shifts(found.after).items():
        spec, scale = (
            found.before.tensors[layer_name, "bias"].spec,
            found.before.tensors[layer_name, "bias"].scale,
        )
        codes = network.layers[layer_name].get_parameter("bias") / scale
        assert torch.equal(codes, codes.round())
        clipped = (codes == spec.quant_min) | (codes == spec.quant_max)
        assert (clipped | (shift.abs() <= scale / 2 + 1e-6)).all(), layer_name
        assert not clipped.all()


def test_the_dpu_gives_no_bias_to_a_layer_without_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.Conv2d(3, 2, 3)).eval()
    batches = [Batch((torch.randn(3, 2, 8, 8),), {}, None, None)]
    found = corrected(trace(model, batches[0].args), config(tmp_path, dpu()), batches)
    assert list(found.after.corrections) == ["Sequential::Sequential/Conv2d[2]/conv2d"]


def test_layers_kept_in_float_are_not_corrected(tmp_path: Path) -> None:
    found = of_toy(tmp_path, "mobile", weights(4, layer("se", roles=[])))
    everything = of_toy(tmp_path, "mobile", weights(4))
    left_out = set(everything.after.corrections) - set(found.after.corrections)
    assert {name.rpartition("[")[2] for name in left_out} == {"se]/conv2d"}


@pytest.mark.parametrize(
    "content", [document(include_bias_corr=True), dpu()], ids=["cpu", "dpu"]
)
@pytest.mark.parametrize("name", ["residual", "mobile", "branches"])
def test_values_in_files_give_the_same_corrections_bit_for_bit(
    name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    found = of_toy(tmp_path, name, content)
    filed = replace(found, budget=0).after.corrections
    assert filed.keys() == found.after.corrections.keys()
    assert all(
        torch.equal(filed[name], correction)
        for name, correction in found.after.corrections.items()
    )


def test_a_correction_that_is_not_finite_names_its_layer(tmp_path: Path) -> None:
    found = of_toy(tmp_path, "residual", weights(4))
    name = list(found.calibration.means)[1]
    found.calibration.means[name] = ChannelMean(ch_axis=-3)
    for value in (1.0, float("inf")):
        found.calibration.means[name].observe(torch.full((1, 4, 1, 1), value))
    with pytest.raises(DataError, match="is not finite") as refused:
        found.after  # noqa: B018 - computed when asked for
    assert name in refused.value.message


def of_many_samples(
    folder: Path, model: nn.Module, batches: list[Tensor], bit_width: int = 8
) -> tuple[Corrected, int]:
    """A network calibrated on these batches, and how many samples corrected its biases."""
    content = document(tensor={"weights": {"bit_width": bit_width}}, include_bias_corr=True)
    torch.manual_seed(0)
    data = [Batch((batch,), {}, None, None) for batch in batches]
    found = corrected(trace(model.eval(), (batches[0],)), config(folder, content), data)
    assert found.after.corrections
    return found, found.runner.samples


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


def noise(count: int, size: int, *shape: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, *shape, generator=draw) for _ in range(count)]


def test_it_reads_samples_until_the_corrections_are_sure(tmp_path: Path) -> None:
    batches = noise(30, 10, 3, 8, 8)
    found, samples = of_many_samples(tmp_path, convolutions(), batches)
    assert samples == 40
    # Those of all samples differ by less than a few of the standard errors that were asked for
    in_all = replace(found, sure=False).after.corrections
    steps = output_steps(found.calibration.plan, found.before)
    for name, correction in found.after.corrections.items():
        distance = (correction - in_all[name]).abs().max()
        assert 0 < distance < 2 * 0.25 * steps[name]


def test_batches_that_are_far_apart_are_all_read(tmp_path: Path) -> None:
    batches = noise(30, 10, 3, 8, 8)
    for number, batch in enumerate(batches):
        batch.mul_(10 if number % 7 == 3 else 0.1)
    _, samples = of_many_samples(tmp_path, convolutions(), batches, bit_width=3)
    assert samples == 300


def test_data_that_begin_with_other_samples_are_read_until_these_stand_for_all(
    tmp_path: Path,
) -> None:
    """As images in the order of their classes."""
    batches = noise(30, 10, 3, 8, 8)
    for number, batch in enumerate(batches):
        batch.add_(number // 10)
    _, samples = of_many_samples(tmp_path, convolutions(), batches)
    assert samples > 100
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    ordered = [batch + number // 10 for number, batch in enumerate(noise(30, 10, 16))]
    _, samples = of_many_samples(tmp_path, linear, ordered)
    assert samples > 100


def test_float_outputs_are_corrected_on_all_samples(tmp_path: Path) -> None:
    batches = noise(30, 10, 3, 8, 8)
    data = [Batch((batch,), {}, None, None) for batch in batches]
    model = convolutions().eval()
    found = corrected(trace(model, (batches[0],)), config(tmp_path, weights(8)), data)
    assert found.mean_shift(found.before) >= 1e4 * found.mean_shift(found.after)


def test_a_layer_with_one_value_a_sample_asks_for_forty(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    for size, samples in ((1, 40), (6, 42), (25, 100)):
        _, read = of_many_samples(tmp_path, model, noise(100, size, 16), bit_width=3)
        assert read == samples


def test_few_samples_are_all_read(tmp_path: Path) -> None:
    _, samples = of_many_samples(tmp_path, convolutions(), noise(3, 13, 3, 8, 8))
    assert samples == 39


def test_data_that_change_are_refused_before_their_end(tmp_path: Path) -> None:
    """The corrections would compare different samples."""
    batches = noise(30, 10, 3, 8, 8)
    passes = iter((batches, batches, batches[:1] + batches[2:], batches))

    class Shuffled:
        def __iter__(self) -> Iterator[Tensor]:
            return iter(next(passes))

    with pytest.raises(DataError, match="gives different batches when it is read again"):
        quantizer.calibrate(convolutions(), document(include_bias_corr=True), Shuffled())
