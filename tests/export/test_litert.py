"""`--to litert`: LiteRT runs the file with its int8 kernels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranked import require_sort_is_refused
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command

for _package in ("litert_torch", "ai_edge_litert"):
    pytest.importorskip(_package, reason="--to litert needs it (extra: litert)")
pytestmark = [
    pytest.mark.real,
    pytest.mark.shows("like MobileNetV2 (random)", "LiteRT, if installed"),
    pytest.mark.filterwarnings("ignore:.*"),
]
PRESET = str(ROOT / "configs" / "mobile_int8.json")
X = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Inverted(nn.Module):
    """A block of MobileNetV2, whose depthwise convolution follows a padding of its own."""

    def __init__(self, padding: tuple[int, ...]) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, groups=16)
        self.pad, self.out = nn.ZeroPad2d(padding), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.deep(self.pad(nn.functional.relu6(self.wide(x)))))
        return x + self.out(y)  # type: ignore[no-any-return]


def mobile() -> nn.Module:
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6())
    blocks = (Inverted((1, 1, 1, 1)), Inverted((0, 2, 0, 2)))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(*stem, *blocks, *head)


def result_of(module: nn.Module) -> quantizer.Result:
    torch.manual_seed(0)
    return quantizer.calibrate(module.eval(), PRESET, [X])


def details(path: Path) -> list[dict[str, Any]]:
    """The inputs and outputs of a file, as its interpreter states them."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    return [*interpreter.get_input_details(), *interpreter.get_output_details()]


@pytest.mark.parametrize(("io", "dtype"), [("float", np.float32), ("int8", np.int8)])
def test_a_small_network_is_equal_in_int8(io: str, dtype: Any, tmp_path: Path) -> None:
    """With batches of any size, and without a transpose around each padding."""
    path = tmp_path / "net.tflite"
    verified = result_of(mobile()).export("litert", path, [X, X[:1], X[:3]], litert_io=io)
    assert (verified.equal, verified.max_difference) == (1.0, 0.0)
    assert verified.kernels is not None
    assert (verified.kernels.share, verified.kernels.count) == (1.0, 8)
    assert verified.remarks == (
        "the file takes any batch: resize its inputs before a call",
        "1 TRANSPOSE changes the layout of images in memory",
    )
    rows = details(path)
    assert [row["dtype"] for row in rows] == [dtype, dtype]
    assert [row["name"] for row in rows] == ["input", "output_0"]
    assert [list(row["shape_signature"]) for row in rows] == [[-1, 3, 16, 16], [-1, 5]]


def test_two_files_of_one_network_are_equal(tmp_path: Path) -> None:
    result = result_of(mobile())
    for name in ("one.tflite", "two.tflite"):
        result.export("litert", tmp_path / name, [X[:2]])
    assert (tmp_path / "one.tflite").read_bytes() == (tmp_path / "two.tflite").read_bytes()


class Derived(nn.Module):
    """Returns its input, an image and what is computed of it without a layout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x)
        return x, y, y * 0.5, y.flatten(1), y.mean((2, 3))


def test_outputs_that_others_are_computed_of_keep_their_layout(tmp_path: Path) -> None:
    verified = result_of(Derived()).export("litert", tmp_path / "net.tflite", [X])
    assert (verified.equal, verified.max_difference) == (1.0, 0.0)


class Shuffled(nn.Module):
    """Two inputs, and a reshape that a batch of one cannot be told from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 6)

    def forward(self, image: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        grid = self.conv(image).flatten(2).transpose(1, 2)
        return {"grid": grid, "rows": self.fc(tokens).relu()}


def test_inputs_and_outputs_have_the_models_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(6, 7, 4)
    result = quantizer.calibrate(Shuffled().eval(), PRESET, [(X, tokens)])
    verified = result.export("litert", tmp_path / "net.tflite", [(X, tokens)])
    assert verified.within_step is not None
    assert verified.within_step >= 0.999
    names = [row["name"] for row in details(tmp_path / "net.tflite")]
    assert names == ["image", "tokens", "grid", "rows"]


class Joined(nn.Module):
    """Boxes of two stages, of which one is smaller, an average and an interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.boxes = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        stages = [self.first(x).relu()]
        stages.append(self.second(stages[0]) * 0.25)
        boxes = []
        for stage, box in zip(stages, self.boxes, strict=True):
            boxes.append(box(stage).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        wide = nn.functional.interpolate(stages[1], scale_factor=2.0, mode="bilinear")
        return torch.cat(boxes, 1), nn.functional.avg_pool2d(stages[1], 2, 1), wide


def test_joins_and_averages_are_those_of_test_mode(tmp_path: Path) -> None:
    verified = result_of(Joined()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.within_step is not None
    assert verified.within_step >= 0.999
    assert verified.kernels is not None
    assert verified.kernels.share == 1.0


class Letters(nn.Module):
    """A reader of text, which gives classes as [column, sample, class], and its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.conv(x).roll(1, 3).mean(2).permute(2, 0, 1)
        return self.head(columns), torch.arange(16.0)


def test_samples_that_run_alone_are_joined_along_the_axis_of_the_batch(tmp_path: Path) -> None:
    verified = result_of(Letters()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.remarks[0] == "the file takes one sample at a time"
    assert verified.equal > 0.9


class Constants(nn.Module):
    """A scale, a shift and a choice by channels, a padding with a value, and an ELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.randn(1, 8, 1, 1) * 3)
        self.shift = nn.Parameter(torch.rand(8, 16, 16) * 4 - 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x) * self.scale) + self.shift
        y = torch.where(self.scale > 0, y, y * 0.3)
        padded = nn.functional.pad(self.second(y), (1, 1, 1, 1), value=1.0)
        return self.second(nn.functional.elu(self.second(padded)))  # type: ignore[no-any-return]


class Requantized(nn.Module):
    """Joins of values with other scales than the result, as in the pyramids of detectors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        wide = nn.functional.interpolate(self.small(y) * 0.7, scale_factor=2.0)
        return self.last(torch.cat([wide, y], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("network", [Constants, Requantized])
def test_nothing_is_rounded_but_what_the_config_says(
    network: type[nn.Module], tmp_path: Path
) -> None:
    verified = result_of(network()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.equal == 1.0


class Depths(nn.Module):
    """Functions that choose among values, of values that have codes or were interpolated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.logsigmoid(self.conv(x))
        z = nn.functional.interpolate(self.head(y), scale_factor=2, mode="bilinear")
        return nn.functional.softplus(z)


def test_softplus_and_the_logarithm_of_sigmoid_are_computed_in_float(tmp_path: Path) -> None:
    """Softplus had 23 dB, and the converter failed at the other."""
    verified = result_of(Depths()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.sqnr_db is not None
    assert verified.sqnr_db >= 60


def test_layers_that_the_config_leaves_in_float_have_float_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 5))
    config = json.loads(Path(PRESET).read_text("utf-8"))
    del config["$schema"]
    whole = config["overall_quantize_config"]
    for layer in (
        "Conv2d[1]/conv2d",
        "ConvTranspose2d[3]/conv_transpose2d",
        "Linear[6]/linear",
    ):
        outputs = {"activation": config["tensor_quantize_config"]["activation"]}
        entry = {
            "layer_name": f"Sequential::Sequential/{layer}",
            "quantizable_data_type": ["activation"],
            "overall_quantize_config": whole,
            "tensor_quantize_config": outputs,
        }
        config.setdefault("layer_quantize_config", []).append(entry)
    result = quantizer.calibrate(nn.Sequential(*layers, *head).eval(), config, [X])
    verified = result.export("litert", tmp_path / "net.tflite", [X])
    assert verified.equal == 1.0
    assert verified.kernels is not None
    assert len(verified.kernels.integer) == 2


class Upsampling(nn.Module):
    """Transposed convolutions with paddings that the converter does not take as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(3, 8, 3, 2, padding=1, output_padding=1)
        self.second = nn.ConvTranspose2d(8, 4, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def test_transposed_convolutions_run_in_int8(tmp_path: Path) -> None:
    verified = result_of(Upsampling()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.within_step == 1.0
    assert verified.kernels is not None
    assert (verified.kernels.share, verified.kernels.count) == (1.0, 2)


class Attention(nn.Module):
    """A softmax, whose int8 kernel has another scale, and products of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        shares = (query @ key.transpose(-2, -1) / 8**0.5).softmax(-1)
        return self.out(shares @ value)  # type: ignore[no-any-return]


def test_a_softmax_keeps_its_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 40, 8)
    result = quantizer.calibrate(Attention().eval(), PRESET, [x])
    verified = result.export("litert", tmp_path / "net.tflite", [x])
    assert verified.within_step is not None
    assert verified.within_step >= 0.98
    assert verified.kernels is not None
    assert [len(verified.kernels.integer), verified.kernels.count] == [2, 4]
    assert verified.remarks[0] == "the file takes one sample at a time"


class Mixer(nn.Module):
    """Mixes positions by a layer along them, for which the converter transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 4)
        self.along = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = y + self.along(self.norm(y).transpose(1, 2)).transpose(1, 2)
        return self.head(y.mean(1))  # type: ignore[no-any-return]


def test_a_file_of_one_sample_takes_no_batch(tmp_path: Path) -> None:
    """It gave wrong values for one."""
    from ai_edge_litert.interpreter import Interpreter

    path = tmp_path / "net.tflite"
    verified = result_of(Mixer()).export("litert", path, [X])
    assert verified.remarks[0] == "the file takes one sample at a time"
    interpreter = Interpreter(str(path))
    [entry] = interpreter.get_input_details()
    assert list(entry["shape_signature"]) == [1, 3, 16, 16]
    interpreter.resize_tensor_input(entry["index"], [3, 3, 16, 16])
    with pytest.raises((RuntimeError, ValueError)):
        interpreter.allocate_tensors()


class Stream(nn.Module):
    """A residual stream in float, and functions for which XNNPACK has no int8 kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.position = nn.Parameter(torch.randn(1, 256, 8))
        self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.wide(nn.functional.hardswish(self.conv(x))), 0.2)
        y = nn.functional.avg_pool2d(y, 3, 1, 1).flatten(2).transpose(1, 2) + self.position
        y = y + self.down(nn.functional.gelu(self.up(self.norm(y))))
        return self.last(y)  # type: ignore[no-any-return]


def test_outputs_in_float_are_products_of_codes(tmp_path: Path) -> None:
    """XNNPACK computes all operators, for any batch, and nothing is rounded twice."""
    from ai_edge_litert.interpreter import Interpreter

    path = tmp_path / "net.tflite"
    verified = result_of(Stream()).export("litert", path, [X, X[:1]])
    assert verified.within_step is not None
    assert verified.within_step >= 0.999
    assert verified.kernels is not None
    assert (verified.kernels.share, verified.kernels.count) == (1.0, 4)
    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    names = Counter(row["op_name"] for row in interpreter._get_ops_details())
    assert names["DELEGATE"] == 1
    other = tmp_path / "int8.tflite"
    in_int8 = result_of(Stream()).export("litert", other, [X], litert_io="int8")
    assert in_int8.kernels is not None
    assert len(in_int8.kernels.floating) == 2


class Halves(nn.Module):
    """Factors of 2 and 0.5 that belong to the network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.avg_pool2d(self.conv(x) * 2.0, 2)
        z = nn.functional.avg_pool2d(x * 2.0, 2).relu()
        return y * 0.5, z * 0.5, (x * 2.0) * 0.5


def test_factors_of_the_network_stay_what_they_are(tmp_path: Path) -> None:
    verified = result_of(Halves()).export("litert", tmp_path / "net.tflite", [X])
    assert verified.within_step is not None
    assert verified.within_step >= 0.999


def test_a_file_says_how_it_was_made(tmp_path: Path) -> None:
    from ai_edge_litert.tools import flatbuffer_utils

    result_of(mobile()).export("litert", tmp_path / "net.tflite", [X])
    model = flatbuffer_utils.read_model(str(tmp_path / "net.tflite"))
    [entry] = [row for row in model.metadata if row.name == b"quantizer"]
    origin = json.loads(bytes(model.buffers[entry.buffer].data))
    assert (origin["producer"], origin["version"]) == ("quantizer", quantizer.__version__)


MODEL = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(144, 3))

def calibration_data():
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))]
"""


def test_one_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    gate = ["--gate", "litert_int8_share==1"]
    assert run_command(["run", "net.py", "--to", "litert", "-q", *gate]) == 0
    printed = capsys.readouterr().out
    assert "\nWrote quantize_result/export/Sequential.tflite: int8 weights" in printed
    assert "2 of 2 multiplications in int8" in printed
    assert "gate litert_int8_share==1: met" in printed


def test_an_operator_that_the_engine_lacks_is_refused_by_its_layer(tmp_path: Path) -> None:
    require_sort_is_refused("litert", "litert-torch", "comparator block", tmp_path)
