"""Networks calibrated with `--dynamic`: test mode, results and files take other sizes than those
of the calibration, and what cannot hold them is refused before.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.maps import AdaptivelyPooled, Joined, Pooled, Sound, images
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.config.diagnostics import ConfigError
from quantizer.errors import DataError, UsageError
from quantizer.export import CHECKED_TARGETS, planned_refusals
from quantizer.export.acceptance import least_db

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


def dimensions(path: Path) -> list[list[str]]:
    onnx = pytest.importorskip("onnx", reason="the extra onnx reads the file")
    graph = onnx.load(str(path)).graph
    shapes: list[list[str]] = []
    for value in (*graph.input, *graph.output):
        sizes = value.type.tensor_type.shape.dim
        shapes.append([size.dim_param or str(size.dim_value) for size in sizes])
    return shapes


@torch.no_grad()
def test_an_onnx_takes_sizes_that_nothing_was_calibrated_with(
    joined: quantizer.Result, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx writes the file")
    path = tmp_path / "joined.onnx"
    joined.export("onnx", path)
    assert dimensions(path) == [
        ["batch", "3", "height", "width"],
        ["batch", "2", "2*(height/4)", "2*(width/4)"],
    ]
    model = Joined().eval()
    for height, width, samples in OTHERS:
        image = images(height, width, samples)
        tested = joined.network(image)
        loss = decibels(model(image), tested)
        assert loss > 25
        assert decibels(tested, in_onnxruntime(path, image)) >= least_db(loss)


@pytest.mark.extended
@torch.no_grad()
def test_a_pt2_takes_them_too(joined: quantizer.Result, tmp_path: Path) -> None:
    joined.export("pt2_float", tmp_path / "joined.pt2")
    program = torch.export.load(tmp_path / "joined.pt2").module()
    for height, width, samples in OTHERS:
        image = images(height, width, samples)
        torch.testing.assert_close(program(image), joined.network(image))


@torch.no_grad()
def test_one_size_opens_alone(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx writes the file")
    data = [images(16, 16), images(16, 24)]
    result = quantizer.calibrate(Pooled().eval(), CPU, data, dynamic="width")
    result.export("onnx", tmp_path / "pooled.onnx")
    assert dimensions(tmp_path / "pooled.onnx") == [
        ["batch", "3", "16", "width"],
        ["batch", "3"],
    ]
    image = images(16, 41)
    actual = in_onnxruntime(tmp_path / "pooled.onnx", image)
    assert decibels(result.network(image), actual) > 40
    with pytest.raises(DataError, match=r"expected \[b, 3, 16, width\]"):
        result.network(images(24, 16))


@pytest.mark.extended
def test_sounds_have_a_length(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx writes the file")
    sounds = [images()[:, :, 0], images(1, 40)[:, :, 0]]
    result = quantizer.calibrate(Sound().eval(), CPU, sounds, dynamic="length")
    result.export("onnx", tmp_path / "sound.onnx")
    assert dimensions(tmp_path / "sound.onnx") == [
        ["batch", "3", "length"],
        ["batch", "1", "2*length"],
    ]


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
        ConfigError, match="the DPU runs one size, and --dynamic leaves height open"
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
