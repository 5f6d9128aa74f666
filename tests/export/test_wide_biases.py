"""Biases that no int32 holds in units of a layer's sums, in a default session of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quantizer

onnxruntime = pytest.importorskip("onnxruntime", reason="it runs files of this target (extra: onnx)")
LAYERS = {
    "conv2d": lambda: (nn.Conv2d(4, 4, 1), (8, 4, 3, 3)),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(4, 4, 1), (8, 4, 3, 3)),
    "linear": lambda: (nn.Linear(4, 4), (8, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_bias_far_above_16_bit_products_is_added_in_full(kind: str, granularity: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[kind]()
    nn.init.constant_(layer.bias, 3.0)
    axis = {"ch_axis": 1 if kind == "conv_transpose2d" else 0} if granularity == "per_channel" else {}
    tensors = {
        "weight": {"dtype": "int16", "qscheme": granularity, **axis},
        "input_tensors": {"dtype": "int16"},
        "output_tensors": {"dtype": "uint8", "symmetric": False},
    }
    batch = torch.randn(shape) * 0.01
    result = quantizer.calibrate(nn.Sequential(layer), {"global_quant_config": tensors}, [batch])
    result.export("onnx", tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), result.network(batch).detach(), rtol=0, atol=0.02)
