"""An .onnx has the names of the user's model for its inputs and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from torch import Tensor, nn

import quantizer
from quantizer.errors import UsageError
from quantizer.export.value_names import input_names
from quantizer.graph.tracing.trace import trace

onnx = pytest.importorskip("onnx", reason="needs quantizer-torch[onnx]")
ort = pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")

CONFIG = document(overall={"symmetry": False})


class Detector(nn.Module):
    """Names that are also those of operators and of values inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, relu: Tensor, *, sizes: Tensor, extra: dict[str, Tensor]) -> Any:
        x = torch.relu(self.conv(relu)) + sizes[:, None, None, None]
        return {"boxes": x, "add": (x + extra["low"][:, None, None, None]).mean((2, 3))}


class Many(nn.Module):
    def forward(self, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        first, second = features
        return torch.relu(first) + second, [second * 2]


class Listed(nn.Module):
    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        return sum(others, first)


def batch(kwargs_first: str = "sizes") -> dict[str, Any]:
    torch.manual_seed(0)
    made = {
        "sizes": torch.rand(2),
        "extra": {"low": torch.rand(2)},
        "relu": torch.randn(2, 3, 4, 4),
    }
    return {kwargs_first: made.pop(kwargs_first), **made}


def names_of(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


@pytest.mark.slow
def test_inputs_are_parameters_and_outputs_keys(tmp_path: Path) -> None:
    result = quantizer.calibrate(Detector().eval(), CONFIG, [batch()])
    path = tmp_path / "detector.onnx"
    result.export("onnx", path)  # verified by name in ONNX Runtime
    inputs, outputs = names_of(path)
    assert sorted(inputs) == ["extra.low", "relu", "sizes"]
    assert outputs == ["boxes", "add"]
    given = batch()
    feed = {"sizes": given["sizes"], "extra.low": given["extra"]["low"], "relu": given["relu"]}
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in feed.items()})
    with torch.no_grad():
        wanted = result.network(**given)
    for name, value in zip(outputs, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(value), wanted[name], atol=0.05, rtol=0)


def test_the_order_of_keyword_arguments_does_not_matter(tmp_path: Path) -> None:
    result = quantizer.calibrate(Detector().eval(), CONFIG, [batch()])
    other_order = [batch("relu"), batch("extra")]
    verified = result.export("onnx", tmp_path / "detector.onnx", other_order)
    assert verified.max_difference < 0.05


@pytest.mark.slow
def test_other_outputs_and_arguments_are_numbered(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    result = quantizer.calibrate(Many().eval(), CONFIG, [([x, x + 1],)])
    result.export("onnx", tmp_path / "many.onnx")
    assert names_of(tmp_path / "many.onnx") == (
        ["features.0", "features.1"],
        ["output_0", "output_1.0"],
    )


def test_further_arguments_are_numbered() -> None:
    x = torch.randn(2, 4)
    model = Listed().eval()
    assert input_names(model, trace(model, (x, x, x))) == ["first", "others_0", "others_1"]
    assert input_names(None, trace(model, (x, x))) == ["input_0", "input_1"]


def test_names_can_be_chosen(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    result = quantizer.calibrate(Many().eval(), CONFIG, [([x, x + 1],)])
    path = tmp_path / "many.onnx"
    result.export("onnx", path, input_names="left, right", output_names="sum,double")
    assert names_of(path) == (["left", "right"], ["sum", "double"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"input_names": "a"}, "has 1 name, and the model has 2 tensors there"),
        ({"input_names": "a,a"}, "is empty or given twice"),
        ({"output_names": "a,"}, "a name is empty"),
        ({"output_names": "features.0,b"}, "both called 'features.0'"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    names: dict[str, str], message: str, tmp_path: Path
) -> None:
    x = torch.randn(2, 4)
    result = quantizer.calibrate(Many().eval(), CONFIG, [([x, x + 1],)])
    with pytest.raises(UsageError, match=message):
        result.export("onnx", tmp_path / "many.onnx", **names)
    assert not (tmp_path / "many.onnx").exists()
