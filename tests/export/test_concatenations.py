"""Values that are joined are quantized once, in test mode; in a file each is, so that integers
make and join them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
            12 if kind in ("twice", "bent_between", "read_twice") else 8, 4, 1
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        a, b = self.a(x), F.relu(self.b(x))
        if self.kind == "pooled":
            a = F.max_pool2d(F.relu(a), 3, 1, 1)
        parts = [a, b]
        if self.kind in ("twice", "bent_between"):
            parts = [torch.cat(parts, 1), self.c(x)]
            parts[0] = F.gelu(parts[0]) if self.kind == "bent_between" else parts[0]
        if self.kind == "read_twice":
            parts += [self.c(torch.cat([b, b], 1))]
        y = torch.cat(parts, 1)
        if self.kind == "bent_after":
            y = F.leaky_relu(y, 0.3)
        return self.last(F.relu(y) if self.kind == "cut_after" else y).mean((2, 3))  # type: ignore[no-any-return]


class SideBySide(nn.Module):
    """Several kinds; the layers of each have its name in theirs."""

    def __init__(self, kinds: Iterable[str]) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({kind: Joined(kind) for kind in kinds})

    def forward(self, x: Tensor) -> list[Tensor]:
        return [network(x) for network in self.kinds.values()]


def result(*kinds: str, **activation: str) -> quantizer.Result:
    torch.manual_seed(0)
    model, data = SideBySide(kinds).eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
    config = json.loads((ROOT / "configs" / "cpu_int8.json").read_text())
    config["tensor_quantize_config"]["activation"] |= activation
    return quantizer.calibrate(model, config | {"$schema": "layered.schema.json"}, data)


KINDS = ("plain", "pooled", "twice", "bent_between", "read_twice", "cut_after")
"""Of these all is multiplied in integers."""


def test_no_code_changes_and_all_is_multiplied_in_integers(tmp_path: Path) -> None:
    """Behind "bent_after" is an activation function that changes codes, so nothing is rounded
    before it.
    """
    verification = result(*KINDS, "bent_after").export("onnx", tmp_path / "net.onnx")
    session = verification.default_session
    assert session is not None
    assert session.kernels is not None
    in_float = [layer for layer in session.kernels.floating if "bent_after" not in layer]
    assert in_float == []
    assert session.first_differing is None
    assert len(verification.parts) == len(KINDS) + 1
    assert all(part.equal_share >= 0.99 for part in verification.parts)


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
