"""Files take any number of samples, or the number is fixed and said: states with the batch on
another axis, code of its own for one sample, and sizes that torch takes for constants.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.onnx_files import quick_files
from torch import Tensor, nn

import quantizer
from quantizer.errors import ModelError, QuantizerError
from quantizer.export.programs import program
from quantizer.graph.tracing.batch_axes import fixed_batch
from quantizer.numerics.metrics import sqnr_db

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

__all__ = ["quick_files"]


class Streaming(nn.Module):
    """A recurrent layer over a slice, which takes its state and a number, and gives the state.

    The slice's strides are those of a batch of two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor, gain: Tensor) -> dict[str, Tensor]:
        steps, state = self.cells(x[..., :6] * gain, state)
        scores = self.head(steps).clamp(-1, 1.5)
        scores.unbind(1)[1].mul_(2.0)
        return {"scores": scores, "memory": state}


class TimeFirst(nn.Module):
    """An LSTM that has time in the first axis of its input, samples in that of no input."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor, cell: Tensor) -> dict[str, Tensor]:
        steps, (state, cell) = self.cells(x, (state, cell))
        return {"scores": self.head(steps), "memory": state, "cells": cell}


class Paired(nn.Module):
    """Has code of its own for batches of two, which are those that are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden * 2 if x.shape[0] == 2 else hidden  # type: ignore[no-any-return]


class Centered(nn.Module):
    """Subtracts the mean of several samples, and leaves a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if x.shape[0] > 1:
            hidden = hidden - hidden.mean(0, keepdim=True)
        return hidden


class Rejoined(nn.Module):
    """Takes the first sample off and puts it back, which fixes the batch at an example of 2."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:1], x[1:]]) * 2.0


def streams(samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.rand(samples, 3, 12, generator=draw),
        torch.rand(2, samples, 8, generator=draw),
        torch.tensor(1.5),
    )


def steps_first(samples: int, seed: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    sizes = [(5, samples, 6), (1, samples, 8), (1, samples, 8)]
    return tuple(torch.rand(*shape, generator=draw) for shape in sizes)


def rows(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("quick_files")
@pytest.mark.parametrize(
    ("model_class", "calls", "expected_shapes"),
    [
        (Streaming, streams, {"x": ["batch", 3, 12], "state": [2, "batch", 8], "gain": []}),
        (
            TimeFirst,
            steps_first,
            {"x": [5, "batch", 6], "state": [1, "batch", 8], "cell": [1, "batch", 8]},
        ),
    ],
)
def test_states_are_open_along_their_own_axis(
    model_class: type[nn.Module],
    calls: Callable[[int, int], tuple[Tensor, ...]],
    expected_shapes: dict[str, Any],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = model_class().eval()
    data = [calls(8, seed) for seed in range(4)]
    quantized = quantizer.quantize(model, data, to="onnx", folder=tmp_path / "out")
    session = ort.InferenceSession(str(quantized.path))
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes == expected_shapes
    for samples in (1, 2, 5):
        call = calls(samples, 99)
        feed = {name: value.numpy() for name, value in zip(shapes, call, strict=True)}
        with torch.no_grad():
            expected = model(*call)
        for output, values in zip(session.get_outputs(), session.run(None, feed), strict=True):
            assert sqnr_db(expected[output.name], torch.from_numpy(values)) > 25


@pytest.mark.usefixtures("quick_files")
@pytest.mark.parametrize(("model_class", "samples"), [(Centered, 1), (Paired, 2)])
def test_code_for_some_number_of_samples_fixes_the_batch(
    model_class: type[nn.Module], samples: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    data = [rows(8, seed) for seed in range(4)]
    quantized = quantizer.quantize(
        model_class().eval(), data, to="onnx", folder=tmp_path / "out"
    )
    assert f"computes something else for batches of {samples} than for others" in caplog.text
    assert "Note: only batches of 8 samples can run." in quantized.verdict
    session = ort.InferenceSession(str(quantized.path))
    assert session.get_inputs()[0].shape == [8, 6]
    texts: dict[str, str] = session.get_modelmeta().custom_metadata_map
    assert json.loads(texts["sizes"]) == {"batch": "8"}
    with pytest.raises(QuantizerError, match=r"got \[3, 6\]") as refused:
        quantized.result.test([rows(3, 0)])
    assert "drop_last=True" in str(refused.value.help)


@pytest.mark.usefixtures("quick_files")
def test_a_size_equal_to_the_examples_batch_is_open_in_the_file(tmp_path: Path) -> None:
    quantized = quantizer.quantize(
        nn.Sequential(nn.Linear(6, 4), Rejoined()).eval(),
        [rows(8, 0)],
        to="onnx",
        folder=tmp_path / "out",
    )
    session = ort.InferenceSession(str(quantized.path))
    assert session.get_inputs()[0].shape == ["batch", 6]
    for samples in (1, 2, 5):
        (values,) = session.run(None, {"input": rows(samples, 1).numpy()})
        assert values.shape == (samples, 4)


def test_what_the_export_refuses_is_known_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program of the file is made of the trace, and may need a fixed batch."""
    caplog.set_level(logging.WARNING)
    exported = program._with_open_sizes
    fixed: list[int | None] = []

    def refuses(module: nn.Module, graph: Any, *more: Any) -> Any:
        fixed.append(fixed_batch(graph))
        if fixed[-1] is None:
            raise ValueError("the batch is a constant")
        return exported(module, graph, *more)

    monkeypatch.setattr(program, "_with_open_sizes", refuses)
    model = nn.Linear(6, 4).eval()
    quantized = quantizer.quantize(model, [rows(8, 0)], to="pt2", folder=tmp_path / "out")
    assert fixed == [None, 8, 8]
    assert "the batch is a constant; its batch size is fixed at 8" in caplog.text
    assert "Note: only batches of 8 samples can run." in quantized.verdict

    def always(*given: Any) -> Any:
        raise ValueError("no such operator")

    monkeypatch.setattr(program, "_with_open_sizes", always)
    with pytest.raises(ModelError, match="no such operator"):
        quantizer.quantize(model, [rows(8, 0)], to="pt2", folder=tmp_path / "never")
    assert not (tmp_path / "never" / "quant_info.json").exists()
