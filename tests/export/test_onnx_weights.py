"""`--onnx_weights`: which integers hold 8-bit weights, so that a default session is right on
any processor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.configs import document
from support.extended import extended
from torch import Tensor, nn

import quantizer
from quantizer.errors import VerificationError

onnx = pytest.importorskip("onnx", reason="files are read with it (extra: onnx)")
pytest.importorskip("onnxruntime", reason="files are verified with it (extra: onnx)")
pytest.importorskip("onnxscript", reason="torch.onnx needs it (extra: onnx)")

INT8, UINT8 = onnx.TensorProto.INT8, onnx.TensorProto.UINT8


class Extremes(nn.Module):
    """Products whose neighbours add up to more than 16 bits hold: all weights and all inputs
    are large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3), nn.Linear(8, 4)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.uniform_(0.9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mean((2, 3)))


def weights_of(path: Path) -> set[int]:
    return {
        t.data_type
        for t in onnx.load(path).graph.initializer
        if t.name.endswith(".weights.codes")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "expected"), [(8, {UINT8}), (7, {INT8}), *extended((4, {INT8}))]
)
def test_products_that_could_overflow_have_unsigned_weights(
    bits: int, expected: set[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = torch.rand(4, 4, 6, 6) * 0.1 + 0.9
    config = document(
        tensor={
            "weights": {"bit_width": bits},
            "activation": {"symmetry": False, "signed": False},
        }
    )
    found = quantizer.calibrate(Extremes().eval(), config, [data]).export(
        "onnx", tmp_path / "net.onnx", [data]
    )
    assert weights_of(tmp_path / "net.onnx") == expected
    assert found.default_session is not None
    assert found.default_session.first_differing is None
    assert any("--onnx_weights int8" in text for text in found.remarks) == (bits == 8)


@pytest.mark.slow
def test_int8_is_written_where_this_processor_is_right_with_it(tmp_path: Path) -> None:
    data = torch.rand(4, 4, 6, 6) * 0.1 + 0.9
    path, result = (
        tmp_path / "net.onnx",
        quantizer.calibrate(Extremes().eval(), document(), [data]),
    )
    try:
        found = result.export("onnx", path, [data], onnx_weights="int8")
    except VerificationError as refused:
        assert not torch.cpu._is_vnni_supported()
        assert refused.help is not None and "--onnx_weights uint8" in refused.help
        assert not path.exists()
    else:
        assert weights_of(path) == {INT8}
        assert "x86 CPUs without VNNI" in found.remarks[0]
