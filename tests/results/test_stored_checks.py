"""What nobody can have written is refused before a value of it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import quantizer
from quantizer.calibration.statistics import ChannelMean
from quantizer.config.model import QuantizationSpec
from quantizer.errors import ResultError
from quantizer.numerics.histogram import Histogram
from quantizer.results.validation import check_content, spec_fault


@pytest.mark.parametrize(
    ("change", "role", "reason"),
    [
        ({"group_size": 0}, "weights", "per_tensor has no groups of 0"),
        ({"group_size": 1}, "input", "per_tensor has no groups of 1"),
        (
            {"qscheme": "per_channel", "ch_axis": 0, "group_size": 4},
            "weights",
            "per_channel has no groups of 4",
        ),
        (
            {"qscheme": "per_channel", "ch_axis": 1, "group_size": 0},
            "weights",
            "per_channel has no groups of 0",
        ),
        (
            {"qscheme": "per_channel", "ch_axis": 1, "group_size": 4},
            "activation",
            "per_channel has no groups of 4",
        ),
        ({"qscheme": "per_channel"}, "activation", "per_channel has no ch_axis"),
        ({"qscheme": "per_group", "group_size": 4}, "weights", "per_group has no ch_axis"),
        ({"bit_width": True}, "weights", "True is not a valid bit_width"),
        ({}, "weight", "there is no role 'weight'"),
    ],
)
def test_a_spec_that_says_nothing_is_refused_with_the_reason(
    change: dict[str, Any], role: str, reason: str
) -> None:
    words = QuantizationSpec().to_json()
    assert spec_fault(words, "weights") is None
    assert spec_fault(words | change, role) == reason


def test_a_group_may_be_all_of_a_row() -> None:
    words = {"qscheme": "per_group", "ch_axis": -1, "group_size": -1}
    assert spec_fault(QuantizationSpec().to_json() | words, "weights") is None


@pytest.mark.parametrize(
    "change",
    [
        {"count": torch.tensor(0)},
        {"sum": torch.tensor([1.0, torch.inf])},
        {"batches": torch.tensor(-1)},
    ],
)
def test_means_of_nothing_are_refused(change: dict[str, torch.Tensor]) -> None:
    mean = ChannelMean(ch_axis=-1)
    mean.observe(torch.ones(3, 2))
    with pytest.raises(ValueError, match="is not a sum of finite values"):
        mean.load_state_dict(mean.state_dict() | change)


def test_a_histogram_without_values_is_refused() -> None:
    tensors = Histogram.of(torch.ones(1, 3), torch.ones(1), torch.ones(1)).to_tensors()
    with pytest.raises(ValueError, match="a row without values"):
        Histogram.from_tensors(tensors | {"counts": torch.zeros_like(tensors["counts"])})


@pytest.mark.parametrize("name", ["scale", "zero_point", "observed_min"])
@pytest.mark.parametrize("strange", ["0.5", True, None, {}])
def test_a_list_of_numbers_with_another_value_in_it_is_refused(
    strange: Any, name: str, tmp_path: Path
) -> None:
    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": False}
    config, info = {"global_quant_config": {"weight": weight}}, tmp_path / "quant_info.json"
    quantizer.calibrate(torch.nn.Linear(3, 2), config, [torch.randn(4, 3)]).save(tmp_path)
    content = json.loads(info.read_text())
    check_content(content, info)
    ((layer, roles),) = content["tensors"].items()
    roles["weights"][name][-1] = strange
    with pytest.raises(
        ResultError, match=f"quant_info.json is damaged: tensors/{layer}/weights/{name}/1: "
    ):
        check_content(content, info)
