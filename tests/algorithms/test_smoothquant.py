"""SmoothQuant against its paper's claims, and what must hold for any model: the float function
stays.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.extended import extended_except
from support.rescaling import (
    A8,
    CASES,
    W8,
    Gated,
    Outliers,
    built,
    difference,
    quantized_error,
    task_of,
)
from torch import Tensor, nn

from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig
from quantizer.algorithms.smoothquant.smoothquant import (
    ChannelRanges,
    smoothing_loss,
    smoothquant,
)
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.structure.definitions import Fold, InputGroup
from quantizer.layerwise.adjustment import Adjustment, Task
from quantizer.layerwise.fold import (
    admissible,
    fold_factors,
    input_name,
    parameter,
    tie_factors,
)
from quantizer.nn.network import Network

PER_TENSOR = QuantizationSpec()
PER_TOKEN = QuantizationSpec(is_dynamic=True, qscheme="per_token", ch_axis=-1)


def smoothed(task: Task, alpha: object = 0.5) -> Adjustment:
    return smoothquant(task, SmoothQuantConfig(alpha=alpha), Adjustment())  # type: ignore[arg-type]


def outliers(layers: int = 1) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    return Outliers(layers=layers), list(torch.randn(4, 2, 64, 256))


def test_gains_of_the_paper() -> None:
    """Six of 256 channels are 60 times as large, all per tensor at 8 bits. Xiao et al. 2022,
    section 5.4 and figure 10: alpha around 0.5 is best, as 0 leaves the activations and 1 makes
    the weights as hard as they were.
    """
    model, inputs = outliers()
    task = task_of(model, inputs, PER_TENSOR, A8)
    plain = quantized_error(task, Adjustment(), inputs)
    errors = {
        alpha: quantized_error(task, smoothed(task, alpha), inputs)
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    assert plain >= 10 * errors[0.5]
    assert errors[0.0] >= 10 * errors[0.5]
    assert min(errors, key=errors.__getitem__) in (0.5, 0.75)


def test_the_factors_are_those_of_equation_4() -> None:
    model, inputs = outliers(layers=2)
    found = smoothed(task_of(model, inputs), 0.7)
    with torch.no_grad():
        largest = torch.stack([model.norm(x).abs().amax((0, 1)) for x in inputs]).amax(0)
        weights = torch.stack([layer.weight.abs().amax(0) for layer in model.layers]).amax(0)
    factors = largest**0.7 / weights**0.3
    [norm] = [own for own in found.parameters.values() if "bias" in own]
    assert torch.allclose(norm["weight"], model.norm.weight / factors, rtol=1e-5)
    assert torch.allclose(norm["bias"], model.norm.bias / factors, rtol=1e-5)
    scaled = [own["weight"] for own in found.parameters.values() if "bias" not in own]
    for layer, weight in zip(model.layers, scaled, strict=True):
        assert torch.allclose(weight, layer.weight * factors, rtol=1e-5)


def test_factors_are_at_least_scale_clamp_min() -> None:
    """Where inputs are small, so that dividing by a factor does not make them arbitrarily
    large.
    """
    torch.manual_seed(0)
    model = Outliers(16, outliers=0)
    model.norm.weight.data = torch.logspace(-6, 0, 16)
    task = task_of(model, list(torch.randn(2, 8, 16)), activations=A8)
    least = []
    for clamp in (0.02, 1e-9):
        found = smoothquant(
            task, SmoothQuantConfig(alpha=1.0, scale_clamp_min=clamp), Adjustment()
        )
        [norm] = [own for own in found.parameters.values() if "bias" in own]
        least.append(float((model.norm.weight.detach() / norm["weight"]).min()))
    assert least[0] == pytest.approx(0.02, rel=1e-5)
    assert least[1] < 1e-5


USUAL = ("Llama", "GPT2", "Mixtral", "experts", "mobile", "grouped", "gated", "outliers")


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(CASES, *USUAL))
def test_the_float_function_stays(name: str) -> None:
    model, inputs = built(name)
    task = task_of(model, inputs, activations=A8)
    found = smoothed(task)
    assert found.parameters
    assert difference(task, found, inputs) < 1e-5


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("gated", A8),
        ("gated", PER_TOKEN),
        ("outliers", A8),
        ("outliers", PER_TOKEN),
        ("grouped", A8),
    ],
    ids=["gated", "gated_dynamic", "outliers", "outliers_dynamic", "grouped"],
)
def test_auto_is_as_good_as_any_alpha_by_its_own_measure(
    name: str, activations: QuantizationSpec
) -> None:
    model, inputs = built(name)
    task = task_of(model, inputs, W8, activations)
    group = next(
        group
        for group in task.structure.groups
        if group.layers[0].endswith(("/linear", "conv2d"))
    )
    alone = dataclasses.replace(
        task, structure=dataclasses.replace(task.structure, groups=(group,))
    )
    network = Network(task.graph)
    seen = ChannelRanges(network, group, with_sample=True)
    for x in inputs:
        network.observe((x,), {}, {group.source: seen.add})

    def loss(alpha: object) -> float:
        found = smoothed(alone, alpha)
        was, now = (parameter(task.graph, f, group.layers[0]) for f in (Adjustment(), found))
        factors = (
            (now / was).nanmedian(0).values.flatten()
            if now.dim() == 2
            else _conv_factors(now / was, group)
        )
        return smoothing_loss(task, group, seen, factors=factors, adjustment=Adjustment())

    steps = [step / 10 for step in range(11)]
    losses = [loss(alpha) for alpha in steps]
    assert loss("auto") <= min(losses) * (1 + 1e-3)
    assert loss([0.2, 0.8]) <= min(losses[2], losses[8]) * (1 + 1e-3)


def _conv_factors(ratio: Tensor, group: InputGroup) -> Tensor:
    groups = group.channels // ratio.shape[1]
    return (
        ratio.view(groups, len(ratio) // groups, ratio.shape[1], -1)
        .median(1)
        .values.median(2)
        .values.flatten()
    )


def test_only_weights_are_smoothed_as_well() -> None:
    model, inputs = outliers()
    task = task_of(model, inputs, W8)
    assert difference(task, smoothed(task, "auto"), inputs) < 1e-5


def test_nothing_quantized_is_nothing_smoothed() -> None:
    model, inputs = outliers()
    assert smoothed(task_of(model, inputs, None)) == Adjustment()


def test_a_value_without_a_fold_gets_an_explicit_multiplication() -> None:
    torch.manual_seed(0)
    model, inputs = Gated(), list(torch.randn(3, 4, 32) * torch.linspace(0.1, 9, 32))
    task = task_of(model, inputs, activations=A8)
    found = smoothed(task)
    [row] = found.insertions
    assert row.name.endswith("input_scale")
    assert set(row.readers) == set(task.structure.groups[0].layers)
    assert difference(task, found, inputs) < 1e-5
    again = smoothquant(task, SmoothQuantConfig(alpha=0.5), found)
    assert len(again.insertions) == 1, "the second factor goes into the first one's layer"
    assert input_name(task.structure.groups[0], found) == row.name
    assert difference(task, again, inputs) < 1e-5


class Dead(nn.Module):
    """Channel 2 never fires while it is calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)
        self.norm.weight.data[2] = 0
        self.norm.bias.data[2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def test_a_channel_that_never_fires_keeps_its_weights() -> None:
    torch.manual_seed(0)
    model, inputs = Dead(), list(torch.randn(2, 3, 8))
    task = task_of(model, inputs)
    found = smoothed(task)
    [layer] = task.structure.groups[0].layers
    assert torch.equal(found.parameters[layer]["weight"][:, 2], model.layer.weight[:, 2])
    assert all(
        value.isfinite().all() for own in found.parameters.values() for value in own.values()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error_that_names_layer_and_batch(bad: float) -> None:
    model, inputs = outliers()
    task = task_of(model, inputs)
    inputs[2] = inputs[2].clone().index_fill_(2, torch.tensor([3]), bad)
    with pytest.raises(DataError, match=r"batch 2: the input of .*linear has \d+ NaN"):
        smoothed(task)


def test_no_batches_is_an_error() -> None:
    model, inputs = outliers()
    with pytest.raises(DataError, match="no batches"):
        smoothed(dataclasses.replace(task_of(model, inputs), batches=list))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_are_multiplied_by_powers_of_two(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Outliers(64, layers=2).to(dtype)
    inputs = list(torch.randn(2, 4, 64).to(dtype))
    task = task_of(model, inputs)
    found = smoothed(task)
    assert found.parameters
    assert difference(task, found, inputs) == 0


class Offset(nn.Module):
    """A norm whose factor is 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(16) * 0.1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.layer(x * (1.0 + self.weight))


def test_a_norm_with_an_offset() -> None:
    torch.manual_seed(0)
    model, inputs = Offset(), list(torch.randn(2, 5, 16))
    task = task_of(model, inputs, activations=A8)
    fold = task.structure.groups[0].fold
    assert fold is not None
    assert fold.offset == 1
    found = smoothed(task)
    assert not found.insertions
    assert difference(task, found, inputs) < 1e-5


@given(
    st.lists(st.floats(2**-10, 2**10), min_size=8, max_size=8),
    st.permutations([0, 0, 1, 1, 2, 2, 3, 3]),
)
def test_channels_with_one_origin_have_one_factor(
    values: list[float], origin: list[int]
) -> None:
    group = InputGroup("x", ("layer",), -1, 8, fold=Fold("layer", "before", tuple(origin)))
    factors = torch.tensor(values)
    found = tie_factors(group, factors)
    assert bool((found >= factors).all())
    assert torch.equal(found, tie_factors(group, found))
    for channel in range(4):
        mine = torch.tensor([at == channel for at in origin])
        assert bool((found[mine] == factors[mine].max()).all())


def test_repeated_heads_have_one_factor() -> None:
    model, inputs = built("Llama")
    task = task_of(model, inputs, activations=A8)
    group = next(
        each
        for each in task.structure.groups
        if each.layers[0].endswith("Linear[o_proj]/linear")
    )
    assert group.fold is not None
    assert group.fold.channels is not None
    factors = admissible(task.graph, group, Adjustment())(torch.rand(32) + 0.1)
    found = fold_factors(task.graph, group, factors, Adjustment())
    assert difference(task, found, inputs) < 1e-5
    assert len(factors.unique()) <= 16, "four heads read the channels of two"


def test_smoothing_again_changes_nothing_more() -> None:
    """After alpha 0.5, max|X_j| = max|W_j|, so that all factors are 1."""
    model, inputs = outliers()
    task = task_of(model, inputs)
    once = smoothed(task)
    twice = smoothquant(task, SmoothQuantConfig(alpha=0.5), once)
    for name, own in once.parameters.items():
        assert torch.allclose(own["weight"], twice.parameters[name]["weight"], rtol=1e-4)
