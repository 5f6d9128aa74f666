"""Arguments of the Python functions that are of another kind than they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.errors import DataError, ModelError, QuantizerError, UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


DATA = [torch.ones(2, 4), torch.zeros(2, 4)]


def quantize(tmp_path: Path, **arguments: Any) -> Any:
    """Call `quantizer.quantize` with good arguments, except for those given."""
    torch.manual_seed(0)
    good: dict[str, Any] = {"model": Net(), "data": DATA, "to": "w8", "folder": tmp_path / "o"}
    return quantizer.quantize(**{**good, **arguments})


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": Net}, ModelError, "model is a type"),
        ({"data": lambda root: DATA}, DataError, "data needs arguments: root"),
        ({"to": "onnx", "input_names": ["a"]}, UsageError, "input_names is a list, not a text"),
        ({"inputs": "a"}, UsageError, "no target has the option inputs"),
        ({"folder": None}, UsageError, "folder is None, not a path"),
        ({"folder": ""}, UsageError, "folder is an empty path"),
        ({"seed": "1"}, UsageError, "seed is a str, not an int"),
        ({"seed": True}, UsageError, "seed is a bool, not an int"),
        ({"seed": 1 << 64}, UsageError, "seed is 18446744073709551616, not from 0 to"),
        ({"seed": -1}, UsageError, "seed is -1, not from 0 to 18446744073709551615"),
        ({"evaluate": 3}, DataError, "evaluate is an int, not a function of (model, data)"),
        ({"evaluate": lambda model: {}}, DataError, "evaluate takes (model), and it is called"),
        ({"evaluate": lambda model, data: 0.5}, DataError, "evaluate returned 0.5, not a dict"),
    ],
)
def test_arguments_of_another_kind_are_named(
    arguments: dict[str, Any], kind: type[QuantizerError], message: str, tmp_path: Path
) -> None:
    if arguments.get("to") == "onnx":
        pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    with pytest.raises(kind) as caught:
        quantize(tmp_path, **arguments)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    "call", [lambda result: result.save(3), lambda result: result.export("safetensors", None)]
)
def test_places_that_are_no_paths_are_named(call: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    result = quantizer.calibrate(Net(), None, DATA)
    with pytest.raises(UsageError, match="not a path"):
        call(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"events": []}, "events is a list, not a quantizer.calibration.events.Events"),
        ({"batch_size": 2}, "batch_size is for data that a text names"),
        ({"resume": True}, "resume=True needs `folder`"),
        ({"fast_finetune": "ada"}, "fast_finetune='ada' is not a mode"),
        ({"data": torch.ones(2, 4)}, "data is a Tensor, not an iterable of batches"),
    ],
)
def test_arguments_that_calibrate_cannot_use_are_named(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(QuantizerError) as caught:
        quantizer.calibrate(**{"model": Net(), "config": None, "data": DATA, **arguments})
    assert caught.value.message.startswith(message)


def test_a_network_without_an_example_input_needs_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not state the shape of its input"):
        quantize(tmp_path, data=None)


def test_an_engine_that_is_no_target_of_its_own_is_explained() -> None:
    result = quantizer.calibrate(Net(), None, DATA)
    with pytest.raises(UsageError) as caught:
        result.export("tensorrt", "net.onnx")
    assert caught.value.help == 'give target="onnx" onnx_profile="tensorrt"'


def test_a_preset_that_is_no_file_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        quantizer.calibrate(Net(), "cpu_int8", DATA)
    assert "init --preset cpu_int8 -o cpu_int8.json" in str(caught.value.help)


def test_all_findings_of_a_config_stand_on_lines_of_their_own() -> None:
    weight = {"dtype": "int7", "round_method": "up"}
    with pytest.raises(UsageError) as caught:
        quantizer.calibrate(Net(), {"global_quant_config": {"weight": weight}}, DATA)
    places = [line.partition(" ")[0] for line in str(caught.value).splitlines()]
    weights = "config.global_quant_config.weight"
    assert [place for place in places if place != "help:"] == [
        f"{weights}.dtype:",
        f"{weights}.round_method:",
    ]


def test_the_layer_that_a_batch_does_not_fit_is_named_in_place() -> None:
    tensor = {"dtype": "int8", "is_dynamic": False}
    config = {"global_quant_config": {"weight": tensor, "input_tensors": tensor}}
    with pytest.raises(DataError, match="cannot run on this batch") as caught:
        quantizer.ModelQuantizer(config).quantize_model(Net(), [torch.ones(2, 5)])
    assert "the layer fc, a Linear(" in str(caught.value.help)
    assert "it takes 4 values in the last axis" in str(caught.value.help)
