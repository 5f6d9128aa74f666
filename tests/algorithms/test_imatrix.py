"""The algorithm imatrix: scales of groups are searched with the mean squares of inputs."""

from __future__ import annotations

import pytest
import torch
from support.roundings import independent, linear, task_of, to_nearest
from torch import Tensor, nn

from quantizer.algorithms.gptq.algorithms import gptq
from quantizer.algorithms.gptq.settings import GPTQConfig
from quantizer.algorithms.imatrix.imatrix import imatrix
from quantizer.algorithms.imatrix.settings import IMatrixConfig
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight, Task
from quantizer.layerwise.round_to_nearest import nearest

WIDTH = 256
SPECS = {
    "q4_k": QuantizationSpec("q4_k", group_size=32, scale_type="superblock"),
    "q5_k": QuantizationSpec("q5_k", group_size=32, scale_type="superblock"),
    "q6_k": QuantizationSpec("q6_k", group_size=16, scale_type="superblock"),
    "iq4_nl": QuantizationSpec("iq4_nl", group_size=32),
    "int4": QuantizationSpec(bit_width=4, group_size=32),
    "int5 of either sign": QuantizationSpec(
        bit_width=5, group_size=32, symmetric_scale="quant_min"
    ),
}


def grouped(name: str) -> QuantizationSpec:
    fields = SPECS[name].to_json() | {"qscheme": "per_group", "ch_axis": 1}
    is_integer = name.startswith("int")
    return QuantizationSpec(**fields | {"method": "maxmin" if is_integer else "group_mse"})


def uneven(tokens: int, seed: int) -> Tensor:
    """Inputs whose channels differ in size, also within a group."""
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(9))
    return independent(tokens, WIDTH, seed) * torch.logspace(1, -1, WIDTH)[order]


def rounded(task: Task) -> list[RoundedWeight]:
    return [*imatrix(task, IMatrixConfig(), Adjustment()).rounded.values()]


@pytest.mark.parametrize("name", SPECS)
def test_outputs_lose_less_than_with_scales_of_the_weights_alone(name: str) -> None:
    spec = grouped(name)
    weight = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    batches = torch.split(uneven(512, seed=1), 256)
    [found] = rounded(task_of(linear(weight), batches, spec))
    assert torch.equal(nearest(weight, spec, found.qparams), found.weight)
    x = uneven(512, seed=2)
    errors = []
    for values in (found.weight, to_nearest(weight, spec)):
        errors.append(float(((values - weight) @ x.T).square().sum()))
    assert errors[0] < 0.9 * errors[1]
    assert found.after < 0.9 * found.before


def test_errors_count_by_the_mean_squares_of_inputs() -> None:
    """Against the definition, in float64."""
    spec = grouped("q4_k")
    weight = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    x = uneven(64, seed=1)
    [found] = rounded(task_of(linear(weight), torch.split(x, 16), spec))
    squares = x.double().square().mean(0)
    for values, error in (
        (found.weight, found.after),
        (to_nearest(weight, spec), found.before),
    ):
        difference = (values - weight).double().square()
        expected = float(
            (difference * squares).sum() / (weight.double().square() * squares).sum()
        )
        assert error == pytest.approx(expected, rel=1e-5)


def test_a_weight_that_is_used_twice_keeps_its_scales() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.second = nn.Linear(WIDTH, WIDTH, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    task = task_of(Tied(), [uneven(8, seed=1)], grouped("q4_k"))
    found = imatrix(task, IMatrixConfig(), Adjustment())
    assert not found.rounded
    assert len(found.remarks) == 2
    assert "its weight is used elsewhere, too" in found.remarks[0].text


def test_weights_without_groups_are_left_alone() -> None:
    spec = QuantizationSpec(qscheme="per_channel", ch_axis=0)
    task = task_of(nn.Linear(WIDTH, 8), [uneven(8, seed=1)], spec)
    left = imatrix(task, IMatrixConfig(), Adjustment())
    assert not left.rounded
    assert "symmetric integers in groups" in left.remarks[0].text


def test_a_value_that_is_not_finite_names_layer_and_batch() -> None:
    batches = [uneven(8, seed=1), uneven(8, seed=2)]
    task = task_of(nn.Linear(WIDTH, 8), batches, grouped("q4_k"))
    batches[1][3, 5] = torch.nan
    with pytest.raises(DataError, match=r"batch 1: the input of .* has 1 NaN"):
        rounded(task)


def test_without_batches_there_is_nothing_to_weigh_by() -> None:
    batches = [uneven(8, seed=1)]
    task = task_of(nn.Linear(WIDTH, 8), batches, grouped("q4_k"))
    batches.clear()
    with pytest.raises(DataError, match="the calibration data has no batches"):
        rounded(task)


def test_gptq_leaves_super_blocks_to_their_own_search_and_says_so() -> None:
    task = task_of(nn.Linear(WIDTH, 8), [uneven(8, seed=1)], grouped("q6_k"))
    found = gptq(task, GPTQConfig(), Adjustment())
    assert not found.rounded
    [remark] = found.remarks
    assert "imatrix searches them by the data" in remark.text
