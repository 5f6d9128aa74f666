"""Inputs whose channels have different units keep the effect of each channel, or are named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command

CONFIGS = Path(__file__).parents[2] / "configs"
CPU = json.loads((CONFIGS / "cpu_int8.json").read_text()) | {"include_bias_corr": False}
DPU = json.loads((CONFIGS / "dpu.json").read_text())
UNITS = torch.tensor([500.0, 5.0, 10.0, 0.05])
"""Standard deviations of a pressure, a temperature, an acceleration and a rotation."""
MEANS = torch.tensor([101325.0, 290.0, 0.0, 0.0])
Case = tuple[nn.Module, list[Any], int]
"""A model, its data, and the axis of the first input's channels."""


def features(seed: int, *shape: int, means: Tensor | float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 4, generator=generator) * UNITS + means


def for_units(layer: nn.Module, name: str = "weight", axis: int = 1) -> nn.Module:
    """The layer with weights that make up for the units of its input."""
    weight = getattr(layer, name)
    weight.data /= UNITS.view([-1 if each == axis else 1 for each in range(weight.dim())])
    return layer


class Sequence(nn.Module):
    """A recurrent layer, behind a normalization or with weights for the units."""

    def __init__(self, *, is_normalized: bool) -> None:
        super().__init__()
        self.is_normalized = is_normalized
        self.rnn = nn.LSTM(4, 8, batch_first=True)
        self.last = nn.Linear(8, 3)
        if not is_normalized:
            for_units(self.rnn, "weight_ih_l0")

    def forward(self, x: Tensor) -> Tensor:
        if self.is_normalized:
            x = torch.clamp((x - MEANS) / UNITS, -10, 10)
        states, _ = self.rnn(x)
        return self.last(states[:, -1])  # type: ignore[no-any-return]


class Residual(nn.Module):
    """An input that two layers and a sum around them read, beside a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = for_units(nn.Linear(4, 16))
        self.gate = for_units(nn.Linear(4, 16))
        self.action = nn.Linear(2, 16)
        self.last = nn.Linear(16, 4)
        self.last.weight.data *= UNITS.view(4, 1)

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x) + self.action(action)) * self.gate(x).sigmoid()
        return x + self.last(hidden)  # type: ignore[no-any-return]


class Joined(nn.Module):
    """Two inputs in one value, which one layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.first.weight.data[:, :4] /= UNITS
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        joined = torch.cat([x, action], 1)
        return self.last(torch.relu(self.first(joined)))  # type: ignore[no-any-return]


def normalized_sensors() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = MEANS.clone(), UNITS.square()
    return nn.Sequential(
        norm, nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def with_depth(seed: int) -> Tensor:
    image = torch.rand(4, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
    image[:, 3] *= 1e4
    return image


def depth_network() -> nn.Module:
    first = nn.Conv2d(4, 8, 3, padding=1)
    first.weight.data[:, 3] /= 1e4
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(512, 3))


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    rows = []
    for seed in range(count):
        action = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed + 9))
        rows.append((features(seed, 64), action))
    return rows


def rows_of(*shape: int, means: Tensor | float = 0.0) -> list[Tensor]:
    return [features(seed, *shape, means=means) for seed in range(2)]


def signals() -> list[Tensor]:
    """Sensors as [n, channels, time]."""
    return [batch.transpose(1, 2).contiguous() for batch in rows_of(16, 8, means=MEANS)]


CASES: dict[str, Callable[[], Case]] = {
    "a first norm": lambda: (normalized_sensors(), signals(), 1),
    "features": lambda: (
        nn.Sequential(for_units(nn.Linear(4, 32)), nn.Tanh(), nn.Linear(32, 3)),
        rows_of(64),
        1,
    ),
    "sequence": lambda: (Sequence(is_normalized=False), rows_of(16, 12), 2),
    "normalized sequence": lambda: (
        Sequence(is_normalized=True),
        rows_of(16, 12, means=MEANS),
        2,
    ),
    "image with depth": lambda: (depth_network(), [with_depth(seed) for seed in range(2)], 1),
    "residual and two layers": lambda: (Residual(), pairs(2), 1),
    "joined inputs": lambda: (Joined(), pairs(2), 1),
}


def of_case(make: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    model, data, axis = make()
    return model.eval(), data, axis


@torch.no_grad()
def effect(model: Callable[..., Tensor], batch: Any, axis: int, channel: int) -> float:
    """How much the output changes if a channel has the values of other samples."""
    x, *others = batch if isinstance(batch, tuple) else (batch,)
    changed = x.clone()
    values = changed.select(axis, channel)
    values.copy_(values.roll(1, 0))
    difference: Tensor = model(changed, *others) - model(x, *others)
    return float(difference.norm())


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_each_channel_keeps_its_effect(make: Callable[[], Case]) -> None:
    model, data, axis = of_case(make)
    network = quantizer.calibrate(model, CPU, data).network
    x = data[0][0] if isinstance(data[0], tuple) else data[0]
    for channel in range(x.shape[axis]):
        expected = effect(model, data[0], axis, channel)
        assert effect(network, data[0], axis, channel) == pytest.approx(expected, rel=0.2)


def levels(result: quantizer.Result, folder: Path) -> dict[str, Any]:
    result.save(folder)
    header = json.loads((folder / "quant_info.json").read_text())["header"]
    found: dict[str, Any] = header.get("levels", {})
    return found


IMAGES = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ORDINARY: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "images": (lambda: nn.Conv2d(3, 8, 3), IMAGES),
    "normalized images": (lambda: nn.Conv2d(3, 8, 3), (IMAGES - 0.45) / 0.225),
    "pixels as features": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8)),
        IMAGES * torch.linspace(0.01, 1, 8),
    ),
    "a dark channel": (lambda: nn.Conv2d(3, 8, 3), IMAGES * Tensor([1, 1, 0]).view(3, 1, 1)),
}


@pytest.mark.parametrize(("make", "x"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_images_stay_as_they_are(
    make: Callable[[], nn.Module], x: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO):
        assert levels(quantizer.calibrate(make().eval(), CPU, [x]), tmp_path) == {}
    assert "codes per standard deviation" not in caplog.text


MODEL_FILE = """
import torch
from torch import nn
from calibration.test_equalized_inputs import MEANS, UNITS, for_units, normalized_sensors, signals

def model():
    torch.manual_seed(0)
    return normalized_sensors().eval()

def calibration_data():
    return signals()
"""


def written(folder: Path, config: dict[str, Any]) -> list[str]:
    (folder / "net.py").write_text(MODEL_FILE)
    (folder / "config.json").write_text(json.dumps(config))
    return [
        "--model",
        str(folder / "net.py"),
        "--config_file",
        str(folder / "config.json"),
        "--output_dir",
        str(folder / "out"),
    ]


def test_a_file_takes_the_users_own_input(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    given = written(tmp_path, CPU)
    assert run_command(["--quant_mode", "calib", *given]) == 0
    assert run_command(["--quant_mode", "test", *given, "--deploy", "onnx"]) == 0
    [path] = (tmp_path / "out" / "export").glob("*.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    torch.manual_seed(0)
    model, x = normalized_sensors().eval(), signals()[0]
    for channel in range(4):
        expected = effect(model, x, 1, channel)
        assert effect(run, x, 1, channel) == pytest.approx(expected, rel=0.2)
    [row] = json.loads((tmp_path / "out" / "report.json").read_text())["inputs"]
    assert row["input"] == "Sequential::input_0"
    assert max(row["errors"]) < 0.2


def test_channels_that_stay_coarse_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The DPU computes nothing in float."""
    given = written(tmp_path, DPU)
    assert run_command(["--quant_mode", "calib", *given]) == 0
    text = (
        "8 codes per standard deviation are left of channels 0, 1, 2, 3 of Sequential::input_0"
    )
    assert text in capfd.readouterr().err
    assert run_command(["--quant_mode", "test", *given]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert min(report["inputs"][0]["errors"]) > 0.2
    [warning] = [row["text"] for row in report["warnings"] if row["kind"] == "inputs"]
    assert "4 of 4 input channels lose more than a fifth of their effect" in warning


def test_what_scaling_cannot_help_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The first two channels vary little around a large value."""
    torch.manual_seed(0)
    model = nn.Sequential(for_units(nn.Linear(4, 16)), nn.ReLU(), nn.Linear(16, 3)).eval()
    quantizer.calibrate(model, CPU, [features(0, 256, means=MEANS)])
    text = "fewer than 8 codes per standard deviation are left of channels 0, 1 of Sequential"
    assert text in caplog.text


class Late(nn.Module):
    """Reads its second input behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return torch.as_tensor(self.second(y + late))


def test_an_input_that_is_read_later_is_no_obstacle() -> None:
    torch.manual_seed(0)
    batches = [(features(n, 32), torch.randn(32, 8)) for n in range(2)]
    result = quantizer.calibrate(Late().eval(), CPU, batches)
    assert result.test(batches).metrics["sqnr_db"] > 30


class Gated(nn.Module):
    """Layers that read features in their own units, one of them the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = for_units(nn.Linear(4, 4))
        self.last = for_units(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        opened = self.gate(x.mean(1, keepdim=True)).sigmoid()
        return self.last(x * opened)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "steps",
    [{"pre_quant_opt_config": {"name": "smoothquant"}}, {"algo_config": {"name": "awq"}}],
    ids=["smoothquant", "awq"],
)
def test_an_algorithm_scales_an_input_that_is_scaled(steps: dict[str, Any]) -> None:
    """Both scale what the gate reads, by layers of their own."""
    torch.manual_seed(0)
    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    config = {"global_quant_config": {"weight": weight, "input_tensors": {"dtype": "int8"}}}
    model, data = Gated().eval(), rows_of(16, 8)
    network = quantizer.calibrate(model, config | steps, data).network
    names = [node.name for node in network.graph.nodes]
    assert len(names) == len(set(names))
    for channel in range(4):
        expected = effect(model, data[0], 2, channel)
        assert effect(network, data[0], 2, channel) == pytest.approx(expected, rel=0.2)
