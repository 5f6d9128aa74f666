"""Integer codes as ONNX stores them: which type holds a grid exactly, and its bytes. Knows no graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from quantizer.config.model import QuantizationSpec


@dataclass(frozen=True)
class Carrier:
    """An ONNX integer type for QuantizeLinear and DequantizeLinear, from operator set `opset` on."""

    data_type: int
    low: int
    high: int
    opset: int = 13
    storage: torch.dtype = torch.int64


CARRIERS = (
    Carrier(TensorProto.INT4, -8, 7, 21, torch.uint8),
    Carrier(TensorProto.UINT4, 0, 15, 21, torch.uint8),
    Carrier(TensorProto.INT8, -128, 127, 13, torch.int8),
    Carrier(TensorProto.UINT8, 0, 255, 13, torch.uint8),
    Carrier(TensorProto.INT16, -(1 << 15), (1 << 15) - 1, 21, torch.int16),
    Carrier(TensorProto.UINT16, 0, (1 << 16) - 1, 21, torch.uint16),
)
"""The narrowest first."""
INT32 = Carrier(TensorProto.INT32, -(1 << 31), (1 << 31) - 1, 13, torch.int32)
"""Takes part in DequantizeLinear alone, without a zero point."""


def carrier_of(spec: QuantizationSpec, opset: int) -> Carrier | None:
    """The narrowest type that holds every code of the grid at this operator set, if there is one.

    >>> carrier_of(QuantizationSpec(bit_width=3), 21).high, carrier_of(QuantizationSpec(bit_width=3), 20).high
    (7, 127)
    """
    fits = (c for c in CARRIERS if c.low <= spec.quant_min and spec.quant_max <= c.high and c.opset <= opset)
    return next(fits, None)


def codes_tensor(name: str, codes: Tensor, carrier: Carrier) -> TensorProto:
    """An initializer of codes; 4-bit ones lie two per byte, the first in the low half, as the ONNX format says."""
    flat = codes.reshape(-1)
    if carrier.data_type in (TensorProto.INT4, TensorProto.UINT4):
        nibbles = torch.nn.functional.pad(flat.to(torch.int64) & 15, (0, flat.numel() % 2)).view(-1, 2)
        flat = nibbles[:, 0] | nibbles[:, 1] << 4
    return _tensor(name, carrier.data_type, codes.shape, flat.to(carrier.storage))


def float_tensor(name: str, values: Tensor) -> TensorProto:
    """An initializer of float32 values."""
    return _tensor(name, TensorProto.FLOAT, values.shape, values.to(torch.float32))


def _tensor(name: str, data_type: int, shape: torch.Size, values: Tensor) -> TensorProto:
    content = values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return onnx.TensorProto(name=name, data_type=data_type, dims=list(shape), raw_data=content)
