"""Networks calibrated with `--dynamic`: test mode, results and files take other sizes than those
of the calibration, and what cannot hold them is refused before.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from support.extended import extended
from support.maps import AdaptivelyPooled, Joined, Pooled, Sound, images
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.config.diagnostics import ConfigError
from quantizer.errors import DataError, UsageError
from quantizer.export.acceptance import least_db
from quantizer.export.refusals import planned_refusals
from quantizer.export.targets import CHECKED_TARGETS

CPU = str(ROOT / "configs" / "cpu_int8.json")
SIZES = ((16, 16), (24, 32), (12, 16))
"""Of the batches of the calibration."""
OTHERS = ((8, 40, 1), (36, 20, 3))
"""Heights, widths and samples of images that no calibration has seen."""


def calibrated(model: nn.Module, dynamic: str = "height,width") -> quantizer.Result:
    data = [images(height, width) for height, width in SIZES]
    return quantizer.calibrate(model.eval(), CPU, data, dynamic=dynamic)


@pytest.fixture(scope="session")
def joined() -> quantizer.Result:
    return calibrated(Joined())


def in_onnxruntime(path: Path, value: Tensor) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx runs the file")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [name] = [node.name for node in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: value.numpy()})[0])


def decibels(values: Tensor, others: Tensor) -> float:
    noise = (values - others).square().sum()
    return float(10 * torch.log10(values.square().sum() / noise.clamp(min=1e-30)))


def stated_sizes(path: Path) -> str:
    onnx = pytest.importorskip("onnx", reason="the extra onnx reads the file")
    stated = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    return str(stated["sizes"])


def dimensions(path: Path) -> list[list[str]]:
    onnx = pytest.importorskip("onnx", reason="the extra onnx reads the file")
    graph = onnx.load(str(path)).graph
    shapes: list[list[str]] = []
    for value in (*graph.input, *graph.output):
        sizes = value.type.tensor_type.shape.dim
        shapes.append([size.dim_param or str(size.dim_value) for size in sizes])
    return shapes


@torch.no_grad()
@pytest.mark.parametrize("target", ["onnx", *extended("pt2_float")])
def test_a_file_takes_sizes_that_nothing_was_calibrated_with(
    target: str, joined: quantizer.Result, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx writes the file")
    path = tmp_path / "joined"
    joined.export(target, path)
    if target == "onnx":
        run = partial(in_onnxruntime, path)
        assert dimensions(path) == [
            ["batch", "3", "height", "width"],
            ["batch", "2", "2*(height/4)", "2*(width/4)"],
        ]
        accepted = "8 or more in steps of 4"
        assert json.loads(stated_sizes(path)) == {"height": accepted, "width": accepted}
    else:
        run = torch.export.load(path).module()
    model = Joined().eval()
    for height, width, samples in OTHERS:
        image = images(height, width, samples)
        tested = joined.network(image)
        loss = decibels(model(image), tested)
        assert loss > 25
        assert decibels(tested, run(image)) >= least_db(loss)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "name", "example", "other", "shapes"),
    [
        (
            Pooled(),
            "width",
            images(16, 16),
            images(16, 41),
            [["batch", "3", "16", "width"], ["batch", "3"]],
        ),
        *extended(
            (
                Sound(),
                "length",
                images(1, 16)[:, :, 0],
                images(1, 41)[:, :, 0],
                [["batch", "3", "length"], ["batch", "1", "2*length"]],
            )
        ),
    ],
    ids=["width", "length"],
)
def test_one_size_opens_alone(
    model: nn.Module,
    name: str,
    example: Tensor,
    other: Tensor,
    shapes: list[list[str]],
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx writes the file")
    path = tmp_path / "file.onnx"
    result = quantizer.calibrate(model.eval(), CPU, [example, other], dynamic=name)
    result.export("onnx", path)
    assert dimensions(path) == shapes
    assert decibels(result.network(other), in_onnxruntime(path, other)) > 40
    with pytest.raises(DataError, match=rf"expected \[b, 3, .*{name}\]"):
        result.network(images(24, 16))


@torch.no_grad()
def test_results_know_their_sizes_without_the_option(
    joined: quantizer.Result, tmp_path: Path
) -> None:
    joined.save(tmp_path / "results")
    # The first batch has a size that the calibration did not begin with
    data = [images(20, 12), images(16, 16)]
    loaded = quantizer.load(tmp_path / "results", Joined().eval(), data)
    assert loaded.test().metrics["sqnr_db"] > 25
    assert torch.equal(loaded.network(data[0]), joined.network(data[0]))
    with pytest.raises(DataError, match="a width of 8 or more in steps of 4, got one of 18"):
        loaded.test([images(16, 18)])


def test_the_dpu_and_scales_of_positions_need_fixed_sizes() -> None:
    with pytest.raises(
        ConfigError, match="the DPU runs one size, and `dynamic` leaves height open"
    ):
        quantizer.calibrate(Pooled().eval(), None, [images()], dynamic="height")
    spec = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 2, "symmetric": True}
    per_row = {"global_quant_config": {"output_tensors": spec}}
    with pytest.raises(ConfigError, match="a scale for each index of axis 2, whose size"):
        quantizer.calibrate(Pooled().eval(), per_row, [images()], dynamic="height")


def test_targets_refuse_before_the_calibration(joined: quantizer.Result) -> None:
    refusal, *_ = planned_refusals(CHECKED_TARGETS["litert"], joined.plan.plan)
    assert refusal.why == "writes fixed sizes, and --dynamic leaves height, width open"
    pytest.importorskip("onnxscript", reason="the extra onnx plans the file")
    with pytest.raises(UsageError, match="pools a map of any size to a constant one"):
        quantizer.quantize(AdaptivelyPooled().eval(), [images()], "onnx", dynamic="height")
    with pytest.raises(UsageError, match="dynamic='depth' is not a size"):
        quantizer.calibrate(Pooled().eval(), CPU, [images()], dynamic="depth")
