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
    "call",
    [
        lambda result: result.save(3),
        lambda result: result.export("safetensors", None),
    ],
)
def test_places_that_are_no_paths_are_named(call: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    result = quantizer.calibrate(Net(), None, DATA)
    with pytest.raises(UsageError, match="not a path"):
        call(result)
