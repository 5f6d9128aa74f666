"""Networks of many kinds in a default ONNX Runtime session: codes of every layer, products in
integers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from support.extended import extended_except
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer.export.agreement import Verification

pytestmark = pytest.mark.slow

ort = pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

DEFAULT = ROOT / "configs" / "default.json"
W8A8 = {
    "global_quant_config": {
        "input_tensors": {"dtype": "int8"},
        "weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0},
    }
}


class FusedHeads(nn.Module):
    """Attention whose query, key and value are slices of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.fused(x).chunk(3, 2)
        )
        return torch.softmax(query @ key.transpose(-2, -1), -1) @ value


class Recurrent(nn.Module):
    """A recurrent layer over what an embedding looks up."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.table, self.cells, self.head = (
            nn.Embedding(20, 8),
            kind(8, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.table(x))[0][:, -1])


class Cosine(nn.Module):
    """Features of maxima, divided by their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 8)
        )
        self.other = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(F.normalize(1e-3 * self.features(x)))


class Slots(nn.Module):
    """Distances of tokens to rows of a parameter, each row divided by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.rows = nn.Linear(16, 8), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows
        for _ in range(4):
            rows = rows.square().sum(1, keepdim=True).rsqrt() * rows
        return self.features(x) @ rows.t()


def zero_bias() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.zeros_(network[0].bias)
    return network


SEEDED = torch.Generator().manual_seed(0)
IMAGES, TOKENS = (torch.rand(shape, generator=SEEDED) for shape in ((2, 3, 8, 8), (2, 5, 16)))
IDS = torch.arange(10).view(2, 5)
CASES: dict[str, tuple[Any, Any, Tensor, float]] = {
    "fused heads": (FusedHeads, DEFAULT, TOKENS, 1.0),
    # ONNX Runtime multiplies recurrent layers in float
    "lstm": (lambda: Recurrent(nn.LSTM), DEFAULT, IDS, 0.5),
    "gru": (lambda: Recurrent(nn.GRU), W8A8, IDS, 0.5),
    "maxima": (Cosine, DEFAULT, IMAGES, 1.0),
    "rows divided by their norm": (Slots, DEFAULT, TOKENS, 1.0),
    "zero bias": (zero_bias, DEFAULT, IMAGES, 1.0),
    "convolutions between floats": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)),
        W8A8,
        IMAGES,
        0.5,
    ),
}


def test_weights_that_stay_in_float_are_not_quantized_by_the_optimizer(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))

    session, _ = exported(build, W8A8, IMAGES, tmp_path)
    assert session.first_differing is None
    assert session.sqnr_db is not None and session.sqnr_db > 100


def exported(
    build: Any, config: Any, batch: Tensor, path: Path
) -> tuple[Verification, onnx.GraphProto]:
    """The verification in a default session, and the graph that its optimizer makes of the
    file.
    """
    torch.manual_seed(0)
    found = quantizer.calibrate(build().eval(), config, [batch]).export(
        "onnx", path / "net.onnx"
    )
    options = ort.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = (
        str(path / "optimized.onnx"),
        4,
    )
    ort.InferenceSession(path / "net.onnx", options, providers=["CPUExecutionProvider"])
    assert found.default_session is not None
    return found.default_session, onnx.load(path / "optimized.onnx").graph


USUAL = (
    "fused heads",
    "gru",
    "maxima",
    "rows divided by their norm",
    "zero bias",
    "convolutions between floats",
)


@pytest.mark.parametrize("name", extended_except(CASES, *USUAL))
def test_layers_have_test_modes_codes_and_no_weight_is_dequantized_in_every_call(
    name: str, tmp_path: Path
) -> None:
    build, config, batch, share = CASES[name]
    session, graph = exported(build, config, batch, tmp_path)
    assert session.kernels is not None
    assert session.kernels.share == share, session.kernels.floating
    assert session.first_differing is None
    assert session.sqnr_db is not None and session.sqnr_db > 40
    weights = {tensor.name for tensor in graph.initializer if ".weights" in tensor.name}
    decoded = [
        node
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in weights
    ]
    assert not decoded
    require_zero_points(tmp_path / "net.onnx")


def require_zero_points(file: Path) -> None:
    """Each DequantizeLinear has a zero point of its codes' type. Without one, AIMET 2.42 reads
    codes of int32 as uint8.
    """
    graph = onnx.load(file).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    decoders = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert decoders
    for node in decoders:
        codes, _, zero_point = node.input
        if codes in types:
            assert types[zero_point] == types[codes], node.name


def test_products_of_one_layer_are_told_apart(tmp_path: Path) -> None:
    session, _ = exported(lambda: Recurrent(nn.RNN), W8A8, IDS, tmp_path)
    assert session.kernels is not None
    assert {f"Recurrent::Recurrent/RNN[cells]/rnn_tanh{part}" for part in ("", "#2")} <= {
        *session.kernels.integer
    }


TABLES = {
    "per_tensor": {"qscheme": "per_tensor"},
    "by rows": {"qscheme": "per_channel", "ch_axis": 0, "symmetric": False},
    "by features": {"qscheme": "per_channel", "ch_axis": 1},
    "groups": {"qscheme": "per_group", "ch_axis": -1, "group_size": 16, "symmetric": False},
}


@pytest.mark.parametrize("name", extended_except(TABLES, "groups", "by rows"))
def test_an_embedding_looks_up_codes(name: str, tmp_path: Path) -> None:
    config = {"global_quant_config": {"weight": {"dtype": "int8", **TABLES[name]}}}
    session, graph = exported(lambda: nn.Embedding(20, 32), config, IDS, tmp_path)
    assert session.equal == 1
    types = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    codes = {t.name for t in graph.initializer if t.data_type in types and t.dims == [20, 32]}
    assert [node.op_type for node in graph.node if codes.intersection(node.input)] == ["Gather"]
