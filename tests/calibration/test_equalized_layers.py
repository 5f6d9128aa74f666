"""Channels of one value that lie a thousandfold apart keep their bits where layers read them
one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from torch import Tensor, nn

import quantizer
from quantizer.algorithms.equalization.powers_of_two import POWER_OF_TWO_EQUALIZATION
from quantizer.cli.main import run_command
from quantizer.errors import ResultError
from quantizer.graph.tracing.trace import trace

ROOT = Path(__file__).parents[2]
CPU = json.loads((ROOT / "configs" / "cpu_int8.json").read_text()) | {
    "include_bias_corr": False
}
DPU = json.loads((ROOT / "configs" / "dpu.json").read_text())
INT8 = {"dtype": "int8", "qscheme": "per_tensor", "symmetric": True, "is_dynamic": False}
WEIGHT = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
HIERARCHICAL = {
    "global_quant_config": {"weight": WEIGHT, "input_tensors": INT8, "output_tensors": INT8}
}
FIRST = "Sequential::Sequential/Conv2d[0]/conv2d"
RANGES = torch.logspace(0, -3, 8)
"""How wide each channel is, from 1 to a thousandth."""


def depthwise(kernel: int = 3) -> nn.Conv2d:
    return nn.Conv2d(8, 8, kernel, padding=kernel // 2, groups=8)


def skewed(*layers: nn.Module) -> nn.Module:
    """The layers, with values between them as wide as RANGES, for which the last layer makes
    up.
    """
    convolutions = [
        layer for layer in layers if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
    ]
    for layer in convolutions:
        layer.weight.data /= layer.weight.data.flatten(1).norm(dim=1).view(8, 1, 1, 1)
    convolutions[0].weight.data *= RANGES.view(8, 1, 1, 1)
    convolutions[-1].weight.data /= RANGES.view(8, 1, 1, 1)
    for layer in convolutions[:-1]:
        assert layer.bias is not None
        layer.bias.data *= RANGES
    return nn.Sequential(*layers).eval()


class Front(nn.Module):
    """A first layer with more channels than the second one reads."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.wide, self.last = nn.Conv2d(8, 10, 1), layers[1]  # type: ignore[index]
        self.wide.weight.data[:8] *= RANGES.view(8, 1, 1, 1)
        assert self.wide.bias is not None
        self.wide.bias.data[:8] *= RANGES
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x)[:, :8])  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two depthwise": lambda: skewed(depthwise(), depthwise()),
    "rectified": lambda: skewed(depthwise(), nn.ReLU(), depthwise()),
    "pointwise before": lambda: skewed(nn.Conv2d(8, 8, 1), nn.ReLU(), depthwise()),
    "pooled": lambda: skewed(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.MaxPool2d(2), depthwise()),
    "transposed": lambda: skewed(
        nn.ConvTranspose2d(8, 8, 2, 2, groups=8), nn.Conv2d(8, 8, 1, groups=8)
    ),
    "transposed behind": lambda: skewed(
        nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=8)
    ),
    "some of the channels": lambda: Front(skewed(depthwise(), depthwise())),
    "three in a row": lambda: skewed(depthwise(), depthwise(1), depthwise()),
}


def images(seed: int, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 8, 16, 16, generator=generator) for _ in range(count)]


def worst_channel(model: nn.Module, config: dict[str, Any] = CPU) -> float:
    """The SQNR of the worst output channel, on an image that calibration has not seen."""
    network = quantizer.calibrate(model, config, images(1)).network
    [image] = images(2, 1)
    with torch.no_grad():
        exact, rounded = model(image).double(), network(image).double()
    signal, error = exact.square().sum((0, 2, 3)), (exact - rounded).square().sum((0, 2, 3))
    return float(10 * (signal / error).log10().min())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "config", [CPU, *extended(HIERARCHICAL)], ids=["layered", "hierarchical"]
)
def test_no_channel_is_lost(make: Callable[[], nn.Module], config: dict[str, Any]) -> None:
    """Without levels the worst channel has 0 dB, or fewer."""
    assert worst_channel(make(), config) > 24


def levels(folder: Path) -> dict[str, list[int]]:
    """What was recorded of a calibration."""
    header: dict[str, Any] = json.loads((folder / "quant_info.json").read_text())["header"]
    found: dict[str, list[int]] = header.get("levels", {})
    return found


def normalizing() -> nn.Module:
    """Weights that are far apart, as their inputs are: what they make is level, whatever
    weights say.
    """
    model = skewed(depthwise(1), nn.ReLU(), depthwise())
    model[2].weight.data *= RANGES.view(8, 1, 1, 1)  # type: ignore[index, union-attr, operator]
    model[0].bias.data /= RANGES  # type: ignore[index, union-attr, operator]
    return model


def of_skewed_images(seed: int) -> list[Tensor]:
    return [image / RANGES.view(8, 1, 1) for image in images(seed)]


LEFT: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], list[Tensor]]]] = {
    "channels are level, though weights are not": lambda: (
        normalizing(),
        CPU,
        of_skewed_images(1),
    ),
    "cut off": lambda: (skewed(depthwise(), nn.ReLU6(), depthwise()), CPU, images(1)),
    "one scale for all weights": lambda: (
        skewed(depthwise(), depthwise()),
        CPU
        | {
            "tensor_quantize_config": CPU["tensor_quantize_config"]
            | {"weights": {"per_channel": False}}
        },
        images(1),
    ),
    "the DPU": lambda: (
        skewed(depthwise(), depthwise()),
        DPU | {"include_cle": False},
        images(1),
    ),
    "ordinary weights": lambda: (
        nn.Sequential(depthwise(), nn.ReLU(), depthwise()),
        CPU,
        images(1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_channels_are_left_where_levels_would_not_help(
    make: Callable[[], tuple[nn.Module, dict[str, Any], list[Tensor]]], tmp_path: Path
) -> None:
    model, config, data = make()
    quantizer.calibrate(model, config, data).save(tmp_path)
    assert {*levels(tmp_path)} <= {"Sequential::input_0"}


def test_a_channel_that_nobody_hears_is_no_reason(tmp_path: Path) -> None:
    """Trained networks have channels that are as good as dead."""
    model = nn.Sequential(depthwise(), nn.ReLU(), depthwise()).eval()
    model[0].weight.data[3] *= 1e-9
    model[0].bias.data[3] *= 1e-9  # type: ignore[union-attr]
    quantizer.calibrate(model, CPU, images(1)).save(tmp_path)
    assert levels(tmp_path) == {}


MODEL = """
import sys
sys.path.insert(0, {here!r})
from test_equalized_layers import MODELS, images

def model():
    return MODELS["pointwise before"]()

def calibration_data():
    return images(1, 4)

def first():
    return images(1, 4)[:2]

def rest():
    return images(1, 4)[2:]
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL.format(here=str(Path(__file__).parent)))
    (tmp_path / "c.json").write_text(json.dumps(CPU))
    return str(tmp_path / "net.py")


def calib(model_file: str, folder: Path, data: str = "calibration_data") -> int:
    config = str(Path(model_file).with_name("c.json"))
    words = [
        "--quant_mode",
        "calib",
        "--config_file",
        config,
        "--model",
        model_file,
        "--data",
        f"{model_file}:{data}",
    ]
    return run_command([*words, "--output_dir", str(folder), "-q"])


@pytest.mark.slow
def test_results_hold_the_levels(model_file: str, tmp_path: Path) -> None:
    """Test mode measures the network that calibration made, and so does an ONNX file."""
    pytest.importorskip("onnxruntime")
    assert calib(model_file, tmp_path / "a") == 0
    [exponents] = levels(tmp_path / "a").values()
    assert exponents == [0, *exponents[1:]]
    assert 8 <= max(exponents) <= 12
    test = [
        "--quant_mode",
        "test",
        "--model",
        model_file,
        "--output_dir",
        str(tmp_path / "a"),
        "--deploy",
        "onnx",
    ]
    assert run_command([*test, "--gate", "sqnr_db>=28", "-q"]) == 0


def merge(model_file: str, folders: list[Path], into: Path) -> int:
    return run_command(
        ["merge", "--model", model_file, "-q", "-o", str(into), *map(str, folders)]
    )


def test_merged_calibrations_have_the_levels_of_both(model_file: str, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        assert calib(model_file, folder, "first") == 0
    assert merge(model_file, folders, tmp_path / "c") == 0
    assert levels(tmp_path / "c") == levels(tmp_path / "a") != {}


def test_calibrations_with_other_levels_are_not_merged(
    model_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, data in zip(folders, ("first", "rest"), strict=True):
        assert calib(model_file, folder, data) == 0
    assert levels(folders[0]) != levels(folders[1])
    assert merge(model_file, folders, tmp_path / "c") == 5
    assert "their channels were levelled by different factors" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"Sequential::nothing": [0] * 8},
        {FIRST: [0] * 7},
        {FIRST: [0.5] * 8},
        {FIRST: [0] * 7 + [900]},
        {FIRST: None},
    ],
    ids=["no such layer", "too few", "no integers", "too large", "no list"],
)
def test_levels_of_another_network_are_refused(wrong: dict[str, Any]) -> None:
    graph = trace(MODELS["two depthwise"](), (images(1)[0],))
    with pytest.raises(ResultError, match="header/levels/Sequential::"):
        POWER_OF_TWO_EQUALIZATION.check(wrong, graph, "quant_info.json")
