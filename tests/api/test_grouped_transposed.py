"""Transposed convolutions with groups: each output channel has a scale of its own, whoever
calibrates or corrects.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.generated import imported
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer import ModelQuantizer
from quantizer.errors import ResultError

KINDS: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
SIZES = {
    "depthwise": (6, 6, 6),
    "two outputs of one input": (3, 6, 3),
    "one output of two inputs": (12, 6, 6),
    "three outputs of two inputs": (4, 6, 2),
}
"""Inputs, outputs and groups; always six outputs."""
LAYERED = document(tensor={"weights": {"per_channel": True, "bit_width": 4}})
HIERARCHICAL: dict[str, Any] = {
    "global_quant_config": {
        "weight": {"dtype": "int4", "qscheme": "per_channel", "is_dynamic": False}
    }
}
FORMS = {"layered": LAYERED, "hierarchical": HIERARCHICAL}


def layer(size: str, dims: int = 2) -> nn.Module:
    """A layer whose output channels differ a thousandfold in range."""
    torch.manual_seed(0)
    inputs, outputs, groups = SIZES[size]
    module = KINDS[dims](inputs, outputs, 3, stride=2, groups=groups)
    ranges = torch.logspace(0, -3, outputs).view(groups, 1, -1, *(1,) * dims)
    with torch.no_grad():
        module.weight.copy_((module.weight.unflatten(0, (groups, -1)) * ranges).flatten(0, 1))
    return module.eval()


def data(size: str, dims: int = 2) -> list[Tensor]:
    """Batches with neighbours that are alike, of which algorithms make use."""
    draw = torch.Generator().manual_seed(1)
    shape = 24, SIZES[size][0], *(4,) * dims
    batches = []
    for _ in range(2):
        noise = torch.randn(shape, generator=draw)
        means = torch.randn(24, *(1,) * (dims + 1), generator=draw)
        batches.append(noise + 2 * means)
    return batches


def by_output(size: str, weight: Tensor) -> Tensor:
    """The weight with a row for each output channel."""
    groups = SIZES[size][2]
    return weight.detach().unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)


def sqnr_db(rounded: Tensor, exact: Tensor) -> Tensor:
    """Of each row."""
    return 10 * torch.log10(exact.square().sum(1) / (rounded - exact).square().sum(1))


def weight_sqnr_db(size: str, model: nn.Module, quantized: nn.Module) -> Tensor:
    """Of the weight of each output channel."""
    exact = by_output(size, model.get_parameter("0.weight"))
    weights = [value for name, value in quantized.named_parameters() if name.endswith("weight")]
    return sqnr_db(by_output(size, weights[0]), exact)


@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_each_output_channel_has_a_scale(size: str, dims: int, tmp_path: Path) -> None:
    # Each size and each number of dimensions in both forms
    form = list(FORMS)[(list(SIZES).index(size) + dims) % 2]
    model, batches = nn.Sequential(layer(size, dims)), data(size, dims)
    result = quantizer.calibrate(model, FORMS[form], batches)
    assert float(weight_sqnr_db(size, model, result.network).min()) > 20
    result.save(tmp_path / "result")
    generated = imported(tmp_path / "result" / "Sequential.py")
    assert torch.equal(generated(batches[0]), result.network(batches[0]))


@pytest.mark.parametrize("size", SIZES)
def test_eight_bits_are_enough_for_each_channel(size: str) -> None:
    model = nn.Sequential(layer(size), nn.Conv2d(6, 6, 1, groups=6))
    result = quantizer.calibrate(model, ROOT / "configs" / "cpu_int8.json", data(size))
    assert float(weight_sqnr_db(size, model, result.network).min()) > 35


@pytest.mark.parametrize("method", ["gptq", "awq", "adaround", "adaquant"])
@pytest.mark.parametrize("size", SIZES)
def test_algorithms_gain_and_no_channel_pays_for_another(size: str, method: str) -> None:
    model, batches = nn.Sequential(layer(size)), data(size)
    finetuned = method if method.startswith("ada") else None
    algorithms: dict[str, Any] = {} if finetuned else {"algo_config": [{"name": method}]}
    plain = quantizer.calibrate(model, HIERARCHICAL, batches)
    result = quantizer.calibrate(
        model, HIERARCHICAL | algorithms, batches, fast_finetune=finetuned
    )
    found = []
    with torch.no_grad():
        for network in (plain.network, result.network):
            outputs = [network(batch) - model(batch) for batch in batches]
            found.append(torch.cat(outputs).transpose(0, 1).flatten(1).square().sum(1))
    before, after = found
    assert bool((after <= 1.5 * before).all())
    assert float(after.log().sum()) < float(before.log().sum())


@pytest.mark.parametrize("size", SIZES)
def test_in_place_it_is_the_same_weight(size: str, tmp_path: Path) -> None:
    model = nn.Sequential(layer(size))
    expected = quantizer.calibrate(model, HIERARCHICAL, data(size)).network(data(size)[0])
    quantized = ModelQuantizer(HIERARCHICAL).quantize_model(copy.deepcopy(model))
    assert torch.equal(quantized(data(size)[0]), expected)
    ModelQuantizer.save(quantized, tmp_path / "saved")
    loaded = ModelQuantizer.load(copy.deepcopy(model), tmp_path / "saved")
    assert torch.equal(loaded(data(size)[0]), expected)


@pytest.mark.parametrize(("axis", "scales"), [(None, 6), (1, 6), (-3, 6), (0, 4)])
def test_an_axis_of_its_own_is_what_the_file_says(axis: int | None, scales: int) -> None:
    fields = HIERARCHICAL["global_quant_config"]["weight"] | {"ch_axis": axis}
    config = {"global_quant_config": {"weight": fields}}
    size = "three outputs of two inputs"
    plan = quantizer.calibrate(nn.Sequential(layer(size)), config, data(size)).plan.plan
    assert [tensor.scales for tensor in plan.tensors.values()] == [scales]


@pytest.mark.parametrize("config", ["dpu.json", "default.json"])
def test_what_has_one_scale_keeps_it(config: str) -> None:
    size = "three outputs of two inputs"
    plan = quantizer.calibrate(
        nn.Sequential(layer(size)), ROOT / "configs" / config, data(size)
    ).plan.plan
    (weights,) = [tensor for tensor in plan.tensors.values() if tensor.role == "weights"]
    assert (weights.spec.qscheme, weights.scales) == ("per_tensor", 1)


@pytest.mark.parametrize("size_in_file", [3, 0])
def test_a_stack_that_the_weight_is_not_is_refused(size_in_file: int, tmp_path: Path) -> None:
    size = "three outputs of two inputs"
    model = nn.Sequential(layer(size))
    quantized = ModelQuantizer(HIERARCHICAL).quantize_model(copy.deepcopy(model))
    ModelQuantizer.save(quantized, tmp_path)
    path = tmp_path / "quantizer.json"
    text = path.read_text("utf-8")
    assert text.count('"group_size": 2') == 1
    path.write_text(
        text.replace('"group_size": 2', f'"group_size": {size_in_file}'), encoding="utf-8"
    )
    with pytest.raises(ResultError):
        ModelQuantizer.load(copy.deepcopy(model), tmp_path)
