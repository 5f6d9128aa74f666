"""What ONNX Runtime, OpenVINO and the ONNX reference evaluator make of one default file, output
by output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from support.extended import extended_except
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer.export.onnx import exporter as onnx_exporter

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

DEFAULT = str(ROOT / "configs" / "cpu_int8.json")
LEAST_DB = 40
"""Of a file's output against test mode's: rounding of single codes, and nothing else."""


class Branches(nn.Module):
    """A stem whose values have a zero point, and one output for each thing that is done with
    them.
    """

    def __init__(self, dims: int, *branches: nn.Module, rectified: bool = False) -> None:
        super().__init__()
        stem = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.stem = stem(3, 8, 3, padding=1)
        self.activation = nn.ReLU() if rectified else nn.Identity()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = self.activation(self.stem(x))
        return [branch(values) for branch in self.branches]


class Applied(nn.Module):
    """A function as a module, and a convolution that reads what it makes."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 8) -> None:
        super().__init__()
        self.function, self.next = function, nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.next(self.function(x))


def transposed(dims: int) -> nn.Module:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return Branches(
        dims,
        kind(8, 4, 4, 2, 1),
        nn.Sequential(kind(8, 8, 2, 2), nn.ReLU(), kind(8, 3, 3)),
        rectified=True,
    )


def pools() -> nn.Module:
    return Branches(
        2,
        Applied(nn.AvgPool2d(3, 2, 1)),
        Applied(nn.AvgPool2d((2, 3), 2, 1, ceil_mode=True)),
        Applied(nn.AvgPool2d(3, 3, 1, ceil_mode=True)),
        Applied(nn.AvgPool2d(3, 2, 1, divisor_override=4)),
        Applied(nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5)),
        Applied(nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1))),
        Applied(nn.Sequential(nn.ZeroPad2d((1, 0, 2, 1)), nn.AvgPool2d(3))),
        Applied(lambda x: x + F.avg_pool2d(x, 3, 1, 1) + F.max_pool2d(x, 3, 1, 1)),
        Applied(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2)), 12),
        nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular"),
    )


def norms() -> nn.Module:
    affine = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    tracked = nn.InstanceNorm2d(8, track_running_stats=True)
    for norm in (affine, tracked):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return Branches(2, affine, Applied(tracked), rectified=True)


class Warped(nn.Module):
    """Reads the size of the batch for places and for constants beside values with a zero
    point.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.turn = nn.Parameter(0.9 * torch.eye(2, 3)[None])
        self.rows = nn.Parameter(torch.randn(1, 8, 1, 7))

    def forward(self, x: Tensor) -> list[Tensor]:
        values = self.stem(x)
        grid = F.affine_grid(
            self.turn.expand(x.shape[0], 2, 3), list(x.shape), align_corners=False
        )
        joined = torch.cat([values, self.rows.expand(x.shape[0], 8, 1, 7)], 2)
        return [self.head(F.grid_sample(values, grid, align_corners=False)), self.head(joined)]


class Tokens(nn.Module):
    """Patches behind a token of their class, as a vision transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 16, 2, 2), nn.Parameter(torch.randn(1, 1, 16))
        self.norm, self.qkv, self.head = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> list[Tensor]:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        query, key, value = (
            self.qkv(self.norm(tokens))
            .unflatten(-1, (3, 2, 8))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return [tokens, self.head(tokens + attended)]


class Sentence(nn.Module):
    """Recurrent layers over rows of tables, one of which is read at fixed places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 6), nn.Embedding(5, 6)
        self.lstm, self.gru = (
            nn.LSTM(6, 8, batch_first=True),
            nn.GRU(6, 8, batch_first=True, bidirectional=True),
        )

    def forward(self, ids: Tensor) -> list[Tensor]:
        rows = self.words(ids) + self.places(torch.arange(5))
        outputs, (hidden, cell) = self.lstm(rows)
        return [rows, outputs, hidden, cell, self.gru(rows)[0]]


class Bags(nn.Module):
    """Rows of tables that are summed up, averaged, compared or weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(20, 6, mode=mode) for mode in ("sum", "mean", "max")
        )
        self.weighted, self.weights = nn.EmbeddingBag(20, 6, mode="sum"), nn.Embedding(20, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> list[Tensor]:
        weights = self.weights(ids).squeeze(-1)
        rows = [
            *(bag(ids) for bag in self.bags),
            self.weighted(ids, per_sample_weights=weights),
        ]
        return [self.head(row) for row in rows]


def images(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, *shape, generator=generator) for _ in range(3)]


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 20, (2, 5), generator=generator) for _ in range(3)]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "transposed": (lambda: transposed(2), lambda: images(6, 6)),
    "transposed, one dimension": (lambda: transposed(1), lambda: images(8)),
    "transposed, three dimensions": (lambda: transposed(3), lambda: images(4, 4, 4)),
    "pools": (pools, lambda: images(9, 10)),
    "norms": (norms, lambda: images(6, 6)),
    "warped": (Warped, lambda: images(7, 7)),
    "tokens": (Tokens, lambda: images(8, 8)),
    "bags": (Bags, sentences),
    "sentence": (Sentence, sentences),
}


USUAL = ("transposed", "pools", "norms", "tokens", "sentence")


def exported(
    build: Callable[[], nn.Module], batches: list[Tensor], path: Path
) -> tuple[list[Tensor], Tensor]:
    """Test mode's outputs for the last batch, of which the file is written."""
    torch.manual_seed(0)
    result = quantizer.calibrate(build().eval(), DEFAULT, batches)
    result.export("onnx", path)
    with torch.no_grad():
        return list(result.network(batches[-1])), batches[-1]


def sqnr_db(expected: Sequence[Tensor], outputs: Sequence[object]) -> list[float]:
    figures = []
    for want, got in zip(expected, outputs, strict=True):
        error = float((want - torch.as_tensor(np.asarray(got))).square().sum())
        figures.append(
            10 * math.log10(float(want.square().sum()) / error) if error else math.inf
        )
    return figures


@pytest.mark.real
@pytest.mark.shows(
    "ViT, LSTM, GRU, transposed convolutions (random)",
    "ONNX Runtime, OpenVINO, the ONNX reference",
)
@pytest.mark.parametrize("name", extended_except(NETWORKS, *USUAL))
def test_all_engines_compute_what_test_mode_does(name: str, tmp_path: Path) -> None:
    ov = pytest.importorskip("openvino", reason="one of them (extra: openvino)")
    build, batches = NETWORKS[name]
    expected, x = exported(build, batches(), tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    feed = {model.graph.input[0].name: x.numpy()}
    session = ort.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = ov.Core().compile_model(str(tmp_path / "net.onnx"), "CPU", exact)
    found = compiled(feed)
    figures = {
        "ONNX Runtime": sqnr_db(expected, session.run(None, feed)),
        "OpenVINO": sqnr_db(expected, [found[value] for value in compiled.outputs]),
        "reference": sqnr_db(
            expected, onnx.reference.ReferenceEvaluator(model).run(None, feed)
        ),
    }
    assert {
        engine: min(values) for engine, values in figures.items() if min(values) < LEAST_DB
    } == {}


@pytest.mark.slow
def test_pads_of_codes_keep_convolutions_and_pools_in_integers(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Branches(2, Applied(nn.AvgPool2d(3, 2, 1)), nn.Conv2d(8, 4, 3, padding=(0, 1)))

    exported(build, images(8, 8), tmp_path / "net.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "net.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 3
    assert kinds.count("QLinearAveragePool") == 1


class Resized(nn.Module):
    """OpenVINO resizes with `antialias` by other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            F.interpolate(self.stem(x), size=(5, 4), mode="bilinear", antialias=True)
        )


@pytest.mark.slow
@pytest.mark.usefixtures("other_engines")
def test_a_file_that_openvino_reads_otherwise_is_written_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openvino", reason="the engine (extra: openvino)")
    result = quantizer.calibrate(Resized().eval(), DEFAULT, images(8, 8))
    (check,) = result.export("onnx", tmp_path / "net.onnx").engines
    assert (tmp_path / "net.onnx").exists()
    assert not check.agrees
    assert not check.reads
    assert (
        check.figures is not None
        and check.figures.sqnr_db is not None
        and check.figures.sqnr_db < 20
    )
    assert check.layer.startswith("Resized::")
    assert [
        record.getMessage() for record in caplog.records if check.line in record.getMessage()
    ]
    assert check.to_json()["agrees"] is False


TWO_WAYS = """
import json, numpy, onnxruntime
with numpy.load("inputs.npz") as inputs:
    (found,) = onnxruntime.InferenceSession("model.onnx").run(None, dict(inputs))
for path, settings in json.load(open("runs.json")).items():
    numpy.savez(path, output_0=found if settings else found * numpy.float32(FACTOR))
"""
"""An engine whose default settings give a multiple of what it is to give."""


@pytest.mark.slow
@pytest.mark.usefixtures("other_engines")
@pytest.mark.parametrize(("factor", "agrees"), [(1.01, True), (-1.0, False)])
def test_default_settings_of_an_engine_are_told_from_how_it_reads_a_file(
    factor: float,
    agrees: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(onnx_exporter, "_PROGRAM", TWO_WAYS.replace("FACTOR", str(factor)))
    monkeypatch.setattr(onnx_exporter, "version", lambda name: "1.2")
    result = quantizer.calibrate(nn.Conv2d(3, 4, 1).eval(), DEFAULT, images(4, 4))
    (check,) = result.export("onnx", tmp_path / "net.onnx").engines
    assert (check.agrees, check.reads, check.layer) == (agrees, True, "")
    assert check.defaults is not None and check.figures is not None
    assert check.defaults.max_difference > check.figures.max_difference
    assert check.to_json()["defaults"]["sqnr_db"] == check.defaults.sqnr_db
    warnings = [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]
    assert [
        text for text in warnings if "computes something else by its default settings" in text
    ] == [f"net.onnx: {check.line}"] * (not agrees)
    assert ("INFERENCE_PRECISION_HINT" in check.line) == (not agrees)


@pytest.mark.usefixtures("other_engines")
@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("import os; os.abort()", "it crashes with signal 6"),
        ("raise ValueError('no such operator')", "ValueError: no such operator"),
        (
            TWO_WAYS.replace("found * numpy.float32(FACTOR)", "found.swapaxes(0, 1)"),
            "output 0 has the shape [4, 2, 4, 4], and [2, 4, 4, 4] in test mode",
        ),
    ],
)
def test_an_engine_that_fails_keeps_no_file_from_being_written(
    script: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_exporter, "_PROGRAM", script)
    monkeypatch.setattr(onnx_exporter, "version", lambda name: "1.2")
    result = quantizer.calibrate(nn.Conv2d(3, 4, 1).eval(), DEFAULT, images(4, 4))
    (check,) = result.export("onnx", tmp_path / "net.onnx").engines
    assert (check.engine, check.agrees, check.failure) == ("OpenVINO 1.2", False, failure)
    assert (tmp_path / "net.onnx").exists()
