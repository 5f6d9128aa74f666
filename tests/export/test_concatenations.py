"""Values that are joined are quantized once, in test mode; in a file each is, so that integers
make and join them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.runs import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

onnx = pytest.importorskip("onnx", reason="the ONNX target needs it (extra: onnx)")
pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

import quantizer

pytestmark = pytest.mark.slow


class Joined(nn.Module):
    """Convolutions side by side, as in SqueezeNet and U-Nets; what they make may be pooled, or
    joined again.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b, self.c = (
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )
        self.last = nn.Conv2d(
            12 if kind in ("twice", "bent between", "read twice") else 8, 4, 1
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        a, b = self.a(x), F.relu(self.b(x))
        if self.kind == "pooled":
            a = F.max_pool2d(F.relu(a), 3, 1, 1)
        parts = [a, b]
        if self.kind in ("twice", "bent between"):
            parts = [torch.cat(parts, 1), self.c(x)]
            parts[0] = F.gelu(parts[0]) if self.kind == "bent between" else parts[0]
        if self.kind == "read twice":
            parts += [self.c(torch.cat([b, b], 1))]
        y = torch.cat(parts, 1)
        if self.kind == "bent after":
            y = F.leaky_relu(y, 0.3)
        return self.last(F.relu(y) if self.kind == "cut after" else y).mean((2, 3))  # type: ignore[no-any-return]


def result(kind: str, **activation: str) -> quantizer.Result:
    torch.manual_seed(0)
    model, data = Joined(kind).eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
    config = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["activation"] |= activation
    return quantizer.calibrate(model, config | {"$schema": "layered.schema.json"}, data)


@pytest.mark.parametrize(
    "kind", ["plain", "pooled", "twice", "bent between", "read twice", "cut after"]
)
def test_all_is_multiplied_in_integers_and_no_code_changes(kind: str, tmp_path: Path) -> None:
    verification = result(kind).export("onnx", tmp_path / "net.onnx")
    found = verification.default_session
    assert found is not None
    assert found.kernels is not None
    assert found.kernels.floating == {}
    assert found.first_differing is None
    assert verification.equal >= 0.99


def test_nothing_is_rounded_before_an_activation_function_that_changes_codes(
    tmp_path: Path,
) -> None:
    verification = result("bent after").export("onnx", tmp_path / "net.onnx")
    assert verification.default_session is not None
    assert verification.default_session.first_differing is None
    assert verification.equal >= 0.99


def test_where_rounding_takes_operators_in_float_nothing_is_added(tmp_path: Path) -> None:
    result("plain", round_mode="half_up").export("onnx", tmp_path / "net.onnx")
    (joined,) = (
        node for node in onnx.load(tmp_path / "net.onnx").graph.node if node.op_type == "Concat"
    )
    makers = {
        name: node.op_type
        for node in onnx.load(tmp_path / "net.onnx").graph.node
        for name in node.output
    }
    assert [makers[name] for name in joined.input] == ["Conv", "Relu"]
