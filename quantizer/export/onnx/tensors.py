"""Integer codes as ONNX stores them: which type holds them, and tensors of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx.conventions import EXACT, Conventions


@dataclass(frozen=True)
class IntegerType:
    """An ONNX integer type of QuantizeLinear and DequantizeLinear since set `opset`."""

    data_type: ir.DataType
    low: int
    high: int
    opset: int = 13


INT8 = IntegerType(ir.DataType.INT8, -128, 127)
UINT8 = IntegerType(ir.DataType.UINT8, 0, 255)
# For DequantizeLinear only, with zero points of 0.
ONNX_INT32 = IntegerType(ir.DataType.INT32, -(1 << 31), (1 << 31) - 1)
# The narrowest first.
_INT16 = IntegerType(ir.DataType.INT16, -(1 << 15), (1 << 15) - 1, 21)
_UINT16 = IntegerType(ir.DataType.UINT16, 0, (1 << 16) - 1, 21)
_INTEGER_TYPES = (
    IntegerType(ir.DataType.INT4, -8, 7, 21),
    IntegerType(ir.DataType.UINT4, 0, 15, 21),
    INT8,
    UINT8,
    _INT16,
    _UINT16,
)
# The signed types of activations, by their unsigned ones and widths.
_UNSIGNED_TYPES = {INT8: (UINT8, 8), _INT16: (_UINT16, 16)}
EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8)
OPSETS = range(18, 24)
"""The operator sets that torch.onnx writes."""


def weight_type(spec: QuantizationSpec, opset: int) -> IntegerType | None:
    """Return the narrowest type for the codes of a weight at this operator set, if any.

    >>> weight_type(QuantizationSpec(bit_width=3), 21).high
    7
    >>> weight_type(QuantizationSpec(signed=False), 21).high
    255
    """
    return _narrowest(_INTEGER_TYPES, spec, opset)


def activation_type(
    spec: QuantizationSpec, opset: int, conventions: Conventions = EXACT
) -> tuple[IntegerType, int] | None:
    """Return the type for the codes of an activation, if any, and the offset to add to codes.

    Codes take at least 8 bits, as ONNX Runtime's optimizer drops a ReLU before 4-bit types
    with any zero point. UINT8 with an offset of 128 holds signed codes, unless the conventions
    are others: ONNX Runtime has no convolutions of INT8 activations on x64. From operator set
    21 on it also cannot move their quantization past a reshape.

    >>> activation_type(QuantizationSpec(), 20)[1]
    128
    >>> activation_type(QuantizationSpec(signed=False), 20)[1]
    0
    """
    is_signed = spec.quant_min < 0
    candidates = [
        kind for kind in _INTEGER_TYPES if kind.high > 15 and (kind.low < 0) == is_signed
    ]
    kind = _narrowest(candidates, spec, opset)
    if kind is None:
        return None
    if kind in _UNSIGNED_TYPES:
        unsigned, bits = _UNSIGNED_TYPES[kind]
        if conventions.makes_unsigned(spec, bits):
            return unsigned, unsigned.low - kind.low
    return kind, 0


def _narrowest(
    candidates: Sequence[IntegerType], spec: QuantizationSpec, opset: int
) -> IntegerType | None:
    for kind in candidates:
        holds = kind.low <= spec.quant_min and spec.quant_max <= kind.high
        if holds and kind.opset <= opset:
            return kind
    return None


def stored_tensor(name: str, values: Tensor, data_type: ir.DataType) -> ir.TensorProtocol:
    """Return values as a tensor of an ONNX type, which holds them."""
    if values.is_floating_point():
        values = values.detach().float()
    array = values.contiguous().numpy().astype(data_type.numpy(), copy=False)
    return ir.Tensor(array, dtype=data_type, name=name)
