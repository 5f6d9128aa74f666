"""`--to executorch`: ExecuTorch runs the file, and XNNPACK computes it in int8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranked import require_sort_is_refused
from support.runs import ROOT
from torch import Tensor, nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import UsageError, VerificationError

pytest.importorskip("executorch.exir", reason="--to executorch needs it (extra: executorch)")
pytestmark = [
    pytest.mark.real,
    pytest.mark.shows("like MobileNetV3 (random)", "ExecuTorch with XNNPACK, if installed"),
    pytest.mark.filterwarnings("ignore:.*"),
]
PRESET = str(ROOT / "configs" / "mobile_int8.json")
X = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Gate(nn.Module):
    """Squeeze and excite between hard-swish, as in MobileNetV3, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 1)
        self.deep = nn.Conv2d(16, 16, 5, 1, 2, groups=16)
        self.down, self.up = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.out, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.hardswish(self.stem(x))
        y = nn.functional.hardswish(self.deep(nn.functional.hardswish(self.wide(x))))
        gate = self.up(self.down(nn.functional.adaptive_avg_pool2d(y, 1)).relu())
        x = x + self.out(y * nn.functional.hardsigmoid(gate))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def result_of(module: nn.Module) -> quantizer.Result:
    torch.manual_seed(0)
    return quantizer.calibrate(module.eval(), PRESET, [X])


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8 * 64, 5))


def test_a_small_network_is_equal_and_all_of_it_is_delegated(tmp_path: Path) -> None:
    """With batches of other sizes than the example's; a second file has the same bytes."""
    result = result_of(small())
    many = X.repeat(7, 1, 1, 1)
    paths = [tmp_path / "one.pte", tmp_path / "two.pte"]
    for path in paths:
        verified = result.export("executorch", path, [many, X[:1], X[:3]])
        assert (verified.equal, verified.max_difference) == (1.0, 0.0)
        assert verified.kernels is not None
        assert (verified.kernels.share, verified.kernels.count) == (1.0, 2)
        assert verified.remarks == (
            'a batch has 1 to 42 samples; executorch_batch="N" sets the largest',
            "XNNPACK computes all operators",
        )
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_network_like_mobilenetv3_keeps_test_modes_accuracy(tmp_path: Path) -> None:
    verified = result_of(Gate()).export("executorch", tmp_path / "net.pte", [X])
    assert verified.kernels is not None
    assert verified.kernels.share == 1.0
    assert verified.within_step is not None
    assert verified.within_step >= 0.99


class Joined(nn.Module):
    """A part, joins of values with several scales, and convolutions with one axis in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.joined, self.pooled = nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 1)
        self.line, self.up = nn.Conv1d(4, 4, 3, padding=1), nn.ConvTranspose1d(4, 2, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x).relu()
        left, _ = first.chunk(2, 1)
        joined = self.joined(torch.cat([first, self.second(left)], 1))
        pooled = nn.functional.max_pool2d(joined, 3, 1, 1)
        pooled = self.pooled(torch.cat([joined, pooled], 1)).flatten(2)
        sound = nn.functional.leaky_relu(self.line(pooled), 0.1)
        return self.up(sound).tanh()


def test_joins_and_convolutions_in_float_are_those_of_test_mode(tmp_path: Path) -> None:
    verified = result_of(Joined()).export("executorch", tmp_path / "net.pte", [X, X[:1]])
    assert verified.sqnr_db > 60
    assert verified.kernels is not None
    assert [len(verified.kernels.integer), len(verified.kernels.floating)] == [5, 1]


class Softplus(nn.Module):
    """Mish, softplus and the logarithm of sigmoid, of images whose sizes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.third, self.last = nn.Conv2d(6, 5, 1), nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(nn.functional.mish(self.first(x)))
        z = self.third(nn.functional.softplus(y, beta=2.0))
        return self.last(nn.functional.logsigmoid(z))  # type: ignore[no-any-return]


def test_functions_of_softplus_are_computed_by_xnnpack(tmp_path: Path) -> None:
    """ExecuTorch's own form of them fails, or has 16 dB if all sizes are equal."""
    verified = result_of(Softplus()).export("executorch", tmp_path / "net.pte", [X])
    assert verified.sqnr_db is not None
    assert verified.sqnr_db >= 60
    assert "XNNPACK computes all operators" in verified.remarks


class Upsampling(nn.Module):
    """Transposed convolutions of an image and of a sound, and one in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(3, 8, 3, 2, padding=1, output_padding=1)
        self.grouped = nn.ConvTranspose2d(8, 4, 2, 2, groups=2)
        self.sound = nn.ConvTranspose1d(4, 2, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.first(x).relu()).relu()
        return self.sound(x.flatten(2))  # type: ignore[no-any-return]


def test_transposed_convolutions_run_in_int8(tmp_path: Path) -> None:
    verified = result_of(Upsampling()).export("executorch", tmp_path / "net.pte", [X])
    assert verified.within_step == 1.0
    assert verified.kernels is not None
    assert ["grouped" in name for name in verified.kernels.floating] == [True]
    assert len(verified.kernels.integer) == 2


def test_biases_of_next_to_no_weights_are_not_cut_off(tmp_path: Path) -> None:
    """XNNPACK's biases are int32, and wrap or saturate where scales are too fine."""
    network = small()
    network[0].weight.data.mul_(1e-7)
    network[0].bias.data.fill_(1.0)
    network[4].bias.data.fill_(2.0)
    verified = result_of(network).export("executorch", tmp_path / "net.pte", [X])
    assert verified.equal == 1.0
    assert verified.kernels is not None
    assert verified.kernels.share == 1.0


def test_a_batch_beyond_the_largest_is_refused(tmp_path: Path) -> None:
    result = result_of(small())
    with pytest.raises(VerificationError, match="takes at most 2 samples") as refused:
        result.export("executorch", tmp_path / "net.pte", [X], executorch_batch="2")
    assert refused.value.help == 'executorch_batch="6", or smaller batches'
    assert not (tmp_path / "net.pte").exists()
    verified = result.export("executorch", tmp_path / "net.pte", [X[:1]])
    assert verified.remarks[0].startswith("a batch has one sample;")


class Recurrent(nn.Module):
    """A recurrent layer or cell that reads rows of images."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        if isinstance(self.layer, nn.RNNBase):
            return self.head(self.layer(rows)[0][:, -1])  # type: ignore[no-any-return]
        state = self.layer(rows[:, 0])
        return self.head(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.GRU(16, 8, batch_first=True),
        lambda: nn.GRUCell(16, 8),
        lambda: nn.LSTMCell(16, 8),
        lambda: nn.LSTM(16, 8, batch_first=True),
    ],
)
def test_recurrent_layers_leave_the_batch_open(layer: Any, tmp_path: Path) -> None:
    """ExecuTorch would fix it at the example's two samples where it finds the gates itself."""
    network = Recurrent(layer())
    verified = result_of(network).export("executorch", tmp_path / "net.pte", [X, X[:1]])
    assert "a batch has 1 to 6 samples" in verified.remarks[0]


def test_a_program_says_how_it_was_made(tmp_path: Path) -> None:
    from executorch.runtime import Runtime

    result_of(small()).export("executorch", tmp_path / "net.pte", [X])
    program = Runtime.get().load_program((tmp_path / "net.pte").read_bytes())
    method = program.load_method("quantizer")
    assert method is not None
    [text] = method.execute([])
    origin = json.loads(text)
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
    gate = ["--gate", "executorch_int8_share==1"]
    assert run_command(["run", "net.py", "--to", "executorch", "-q", *gate]) == 0
    printed = capsys.readouterr().out
    assert "\nWrote quantize_result/export/Sequential.pte: int8 weights" in printed
    assert "2 of 2 multiplications in int8" in printed
    assert "gate executorch_int8_share==1: met" in printed
    report = json.loads(Path("quantize_result/report.json").read_text())
    [file] = report["exports"]
    assert file["kernels"]["share"] == 1.0
    assert [check["engine"] for check in file["checks"]] == ["ExecuTorch"]


def test_an_operator_that_the_engine_lacks_is_refused_by_its_layer(tmp_path: Path) -> None:
    reason = "Failed to load method forward"
    require_sort_is_refused("executorch", "ExecuTorch", reason, tmp_path)


def test_convolutions_with_three_axes_are_refused(tmp_path: Path) -> None:
    """Their program loads, and fails when it runs."""
    network = nn.Sequential(nn.Conv3d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    x = torch.randn(2, 3, 3, 3, 3)
    with pytest.raises(UsageError, match="conv3d, which ExecuTorch does not know"):
        quantizer.quantize(network.eval(), [x], "executorch", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "quant_info.json").exists()
