"""Integer codes as ONNX stores them: which type holds them, and its bytes. Knows no graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from quantizer.config.model import QuantizationSpec


@dataclass(frozen=True)
class Carrier:
    """An ONNX integer type for QuantizeLinear and DequantizeLinear, from operator set `opset`
    on.
    """

    data_type: int
    low: int
    high: int
    opset: int = 13
    storage: torch.dtype = torch.int64


INT8 = Carrier(TensorProto.INT8, -128, 127, 13, torch.int8)
UINT8 = Carrier(TensorProto.UINT8, 0, 255, 13, torch.uint8)
CARRIERS = (
    Carrier(TensorProto.INT4, -8, 7, 21, torch.uint8),
    Carrier(TensorProto.UINT4, 0, 15, 21, torch.uint8),
    INT8,
    UINT8,
    Carrier(TensorProto.INT16, -(1 << 15), (1 << 15) - 1, 21, torch.int16),
    Carrier(TensorProto.UINT16, 0, (1 << 16) - 1, 21, torch.uint16),
)
"""The narrowest first."""
INT32 = Carrier(TensorProto.INT32, -(1 << 31), (1 << 31) - 1, 13, torch.int32)
"""Takes part in DequantizeLinear alone, without a zero point."""


LEAST = 18
"""The first operator set that is written."""


def weight_carrier(spec: QuantizationSpec, opset: int) -> Carrier | None:
    """The narrowest type for the codes of a weight at this operator set, if there is one.

    >>> (
    ...     weight_carrier(QuantizationSpec(bit_width=3), 21).high,
    ...     weight_carrier(QuantizationSpec(signed=False), 21).high,
    ... )
    (7, 255)
    """
    return _narrowest(CARRIERS, spec, opset)


def activation_carrier(spec: QuantizationSpec, opset: int) -> tuple[Carrier, int] | None:
    """The type for the codes of an activation, if there is one, and the number to add to them.

    ONNX Runtime's optimizer drops a ReLU before 4-bit types whatever their zero point, so codes
    take 8 bits at least. On x64 it has no convolutions of INT8 activations, and from operator
    set 21 on it cannot move their quantization past a reshape, so UINT8 holds them, 128 up.

    >>> (
    ...     activation_carrier(QuantizationSpec(), 20)[1],
    ...     activation_carrier(QuantizationSpec(signed=False), 20)[1],
    ... )
    (128, 0)
    """
    signed = spec.quant_min < 0
    carrier = _narrowest(
        [row for row in CARRIERS if row.high > 15 and (row.low < 0) == signed], spec, opset
    )
    if carrier is INT8:
        return UINT8, UINT8.low - INT8.low
    return None if carrier is None else (carrier, 0)


def _narrowest(
    carriers: Sequence[Carrier], spec: QuantizationSpec, opset: int
) -> Carrier | None:
    fits = (
        c
        for c in carriers
        if c.low <= spec.quant_min and spec.quant_max <= c.high and c.opset <= opset
    )
    return next(fits, None)


def codes_tensor(name: str, codes: Tensor, carrier: Carrier) -> TensorProto:
    """An initializer of codes; 4-bit ones lie two per byte, the first in the low half, as the
    ONNX format says.
    """
    flat = codes.reshape(-1)
    if carrier.data_type in (TensorProto.INT4, TensorProto.UINT4):
        nibbles = torch.nn.functional.pad(
            flat.to(torch.int64) & 15, (0, flat.numel() % 2)
        ).view(-1, 2)
        flat = nibbles[:, 0] | nibbles[:, 1] << 4
    return _tensor(name, carrier.data_type, codes.shape, flat.to(carrier.storage))


def float_tensor(name: str, values: Tensor) -> TensorProto:
    """An initializer of float32 values."""
    return _tensor(name, TensorProto.FLOAT, values.shape, values.to(torch.float32))


def _tensor(name: str, data_type: int, shape: torch.Size, values: Tensor) -> TensorProto:
    content = (
        values.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        if values.numel()
        else b""
    )
    return onnx.TensorProto(name=name, data_type=data_type, dims=list(shape), raw_data=content)
