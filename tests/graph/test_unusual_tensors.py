"""Networks with vectors for weights, complex numbers, outputs without dimensions, parts that
torch.jit traced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.onnx_files import quick_files  # noqa: F401 - a fixture
from support.runs import ROOT, calibrate
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import quantizer
from quantizer.errors import ModelError, UsageError
from quantizer.export.agreement import Agreement
from quantizer.graph.tracing.trace import trace

pytest.importorskip("quantizer.export.onnx.exporter", reason="writes .onnx (extra: onnx)")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("quick_files"),
]
DEFAULT = str(ROOT / "configs" / "cpu_int8.json")


class Integral(nn.Module):
    """Means of distributions over distances, as detectors take them: by a buffer, by a trained
    vector, and by one with a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(12, 2)
        self.register_buffer("distances", torch.arange(8.0))
        self.trained = nn.Parameter(torch.arange(8.0))
        self.project = nn.Parameter(torch.arange(8.0))
        self.offset = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.stem(x).unflatten(-1, (4, 8)).softmax(-1)
        sides = [
            F.linear(chances, self.distances),
            F.linear(chances, self.trained),
            F.linear(chances, self.project, self.offset),
        ]
        return self.head(torch.cat(sides, -1))


class Losses(nn.Module):
    """Outputs without dimensions beside the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(x))
        y = self.second(hidden)
        return {
            "y": y,
            "loss": (hidden * hidden).mean(),
            "positive": (y > 0).sum(),
            "most": y.max(),
        }


class Rotary(nn.Module):
    """Queries turned by angles that are complex numbers."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("turns", torch.polar(torch.ones(5, 4), angles).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.query(x).unflatten(-1, (2, 4, 2))
        turned = torch.view_as_complex(pairs) * self.turns[None, :, None]
        return torch.view_as_real(turned).flatten(2).float()


class ComplexLayer(nn.Module):
    """A layer whose weight and bias are complex, and an operator that ONNX has not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        values = torch.view_as_complex(self.first(x).unflatten(-1, (4, 2)))
        return torch.exp(0.1 * self.second(values)).abs()


def spectral() -> nn.Module:
    """A layer of a Fourier neural operator."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.head = nn.Conv1d(3, 6, 1), nn.Conv1d(6, 2, 1)
            self.weight = nn.Parameter(torch.randn(6, 6, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            modes = torch.fft.rfft(self.lift(x))
            return self.head(
                torch.fft.irfft(torch.einsum("bix,iox->box", modes, self.weight), n=8)
            )

    return Spectral()


class Convolutions(nn.Module):
    """What torch.jit.trace writes as one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, 8, 3, bias=False),
            nn.Conv2d(8, 8, 3, 2, 1, groups=2),
        )
        self.up = nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.second(self.first(x))))


def traced() -> nn.Module:
    return nn.Sequential(
        torch.jit.trace(Convolutions().eval(), torch.randn(2, 3, 8, 8)), nn.ReLU()
    )


def batches(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


class ComplexBuffers(nn.Module):
    """Complex numbers that are constants, and those that are trained and transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.spectral = Rotary(), spectral()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(x), self.spectral(x[:, :3, :8])


class Spectrogram(nn.Module):
    """Magnitudes of a short-time Fourier transform, as audio networks compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Buffer(torch.hann_window(32))
        self.linear = nn.Linear(17, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 32, 8, window=self.window, return_complex=True)
        return self.linear(spectrum.abs().mT)


class Spellings(nn.Module):
    """Other names of what torch.onnx translates, on complex numbers [b, 4, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        values = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
        shifted = torch.fft.ifftshift(torch.fft.fftshift(values, -1).adjoint(), -1)
        moved = shifted.movedim(1, 2).swapaxes(1, 2).swapdims(1, 2).moveaxis(1, 2)
        turned = moved.rot90(1, (1, 2)).mH.narrow(1, 0, 3).negative().true_divide(2)
        same = turned.view_as(turned).reshape_as(turned).to(torch.complex64)
        back = torch.fft.ihfft(torch.fft.hfft(same, 6))
        return back.absolute() + torch.fft.hfft2(same, (3, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (Integral, (4, 5, 8)),
    "no dimensions": (Losses, (4, 8)),
    "complex buffers": (ComplexBuffers, (2, 5, 16)),
    "complex128": (lambda: Rotary(torch.complex128), (2, 5, 16)),
    "complex layer": (ComplexLayer, (4, 8)),
    "spectrogram": (Spectrogram, (2, 160)),
    "spellings": (Spellings, (2, 4, 8)),
    "traced by torch.jit": (traced, (2, 3, 8, 8)),
}
REFUSED = {"complex128": "complex128", "complex layer": "computes exp of complex numbers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_is_quantized_stored_and_exported(name: str, tmp_path: Path) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    model, data = build().eval(), batches(*shape)
    result = quantizer.calibrate(model, DEFAULT, data)
    agreement = Agreement("outputs")
    with torch.no_grad():
        expected = result.network(data[0])
        agreement.add(_tensors(model(data[0])), _tensors(expected))
    sqnr_db = agreement.result().sqnr_db
    assert sqnr_db is not None and sqnr_db > 30
    result.save(tmp_path / "results")
    again = quantizer.load(tmp_path / "results", model, data).network(data[0])
    pairs = zip(_tensors(expected), _tensors(again), strict=True)
    assert all(torch.equal(want, got) for want, got in pairs)
    assert result.export("pt2", tmp_path / "net.pt2").equal == 1
    if name in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name]):
            result.export("onnx", tmp_path / "net.onnx")
        return
    session = result.export("onnx", tmp_path / "net.onnx").default_session
    assert session is not None and session.sqnr_db is not None and session.sqnr_db > 80


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def test_layers_of_a_traced_part_have_weights_of_their_own() -> None:
    graph = trace(traced(), (torch.randn(2, 3, 8, 8),))
    owners = [node.op for node in graph.nodes if "weight" in node.params]
    assert owners == ["conv2d", "conv2d", "conv_transpose2d"]


COMPILED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "traced": (
        lambda: torch.jit.trace(Convolutions().eval(), torch.randn(2, 3, 8, 8)),
        "the model is compiled by torch.jit",
    ),
    "frozen": (
        lambda: torch.jit.freeze(torch.jit.script(Convolutions().eval())),
        "the model is compiled by torch.jit",
    ),
    "scripted part": (
        lambda: nn.Sequential(torch.jit.script(Convolutions().eval())),
        "cannot be traced: 0 is compiled by torch.jit",
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_models_are_refused_in_a_sentence(name: str) -> None:
    build, message = COMPILED[name]
    with pytest.raises(ModelError, match=message):
        quantizer.calibrate(build(), DEFAULT, batches(2, 3, 8, 8))


def test_the_shell_refuses_a_compiled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import torch\ndef model():\n    return torch.jit.trace(torch.nn.ReLU(), "
        "torch.ones(2, 2))\n"
    )
    (tmp_path / "net.py").write_text(
        text + "def calibration_data():\n    return [torch.ones(2, 2)]\n"
    )
    assert calibrate(tmp_path / "out", model=str(tmp_path / "net.py")) == 3
    assert "compiled by torch.jit" in capsys.readouterr().err


def test_an_lstm_with_a_projection_is_refused_for_onnx(tmp_path: Path) -> None:
    model = nn.LSTM(6, 8, proj_size=4, batch_first=True).eval()
    result = quantizer.calibrate(model, DEFAULT, batches(2, 5, 6))
    with pytest.raises(UsageError, match="proj_size, which ONNX's LSTM operator lacks"):
        result.export("onnx", tmp_path / "net.onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The use of `x.T`:UserWarning")
def test_a_cell_is_exported_without_a_warning(tmp_path: Path) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x[:, 1], self.cell(x[:, 0]))

    result = quantizer.calibrate(Cell().eval(), DEFAULT, batches(2, 2, 6))
    assert result.export("onnx", tmp_path / "net.onnx").equal == 1
