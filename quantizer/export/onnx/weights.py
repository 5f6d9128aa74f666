"""Writes one weight as codes, with the ONNX operators that dequantize it exactly or multiply by
its codes.
"""

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx.builder import NodeBuilder
from quantizer.export.onnx.lowering import INT8, ONNX_INT32, IntegerType, weight_type
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import pack_bits
from quantizer.numerics.granularity import from_rows, to_rows

BLOCK_SIZE_OPSET = 21
"""The first operator set whose DequantizeLinear has a block_size."""
PACKED_DOMAIN = "com.microsoft"
"""The domain of MatMulNBits."""
# The widths of codes in MatMulNBits; narrower codes take the wider.
_PACKED_BITS = (4, 8)
# The accuracy_level at which MatMulNBits rounds activations to 8 bits.
_INT8_ACTIVATIONS = 4


def quantize_weights(
    builder: NodeBuilder,
    tensor: QuantizedTensor,
    values: Tensor,
    opset: int,
    *,
    transposed: bool = False,
    ahead: bool = False,
) -> ir.Value | None:
    """Add codes, scale, zero point and the node that makes `values` of them; return its value.

    Returns None where floats have to stay, which are exact: in floating-point formats, and in
    groups before operator set 21. With more than 24 bits, float32 cannot compute the value
    from the code.

    Args:
        values: what the codes stand for.
        transposed: write the transpose of codes and values.
        ahead: write nodes that runtimes compute once, when they load the file.
    """
    spec = tensor.spec
    kind = _stored_type(tensor, opset)
    if kind is None or tensor.codes is None or not _is_restored(tensor, values):
        return None
    if spec.qscheme == "per_channel" and spec.group_size is not None:
        return _dequantize_stack(builder, tensor, kind, ahead=ahead)
    codes = tensor.codes
    scale = _along_axis(tensor.scale, spec)
    zero_point = _along_axis(tensor.zero_point, spec)
    axis = spec.ch_axis
    if transposed:
        codes = codes.T
        axis = None if axis is None else 1 - axis
        if spec.qscheme == "per_group":
            scale = scale.T
            zero_point = zero_point.T
    stored = builder.constant("codes", codes, kind.data_type)
    if ahead and spec.qscheme != "per_group":
        # With one scale for each channel, a shape that broadcasts along the other axes.
        shape = [-1 if index == axis else 1 for index in range(codes.dim())]
        if axis is None:
            shape = []
        floats = builder.cast(stored, ir.DataType.FLOAT)
        if zero_point.any():
            # OpenVINO takes Cast, Sub, Mul for a compressed weight, and misreads one that is
            # cut and joined by gates. So the negated zero point is added.
            negated = builder.constant("zero_point", -zero_point.reshape(shape))
            floats = builder.add("Add", floats, negated)
        factor = builder.constant("scale", scale.reshape(shape))
        return builder.add("Mul", floats, factor)
    inputs = [
        stored,
        builder.constant("scale", scale),
        builder.constant("zero_point", zero_point, kind.data_type),
    ]
    attributes: dict[str, Any] = {}
    if axis is not None:
        attributes["axis"] = axis
    if spec.qscheme == "per_group" and spec.ch_axis is not None:
        is_whole = spec.group_size in (None, -1)
        block_size = values.shape[spec.ch_axis] if is_whole else spec.group_size
        attributes["block_size"] = int(block_size or 0)
    return builder.add("DequantizeLinear", *inputs, **attributes)


def _is_restored(tensor: QuantizedTensor, values: Tensor) -> bool:
    """Return whether DequantizeLinear, which computes in float32, restores the values."""
    assert tensor.codes is not None
    spec = tensor.spec
    codes = to_rows(tensor.codes, spec.cut).to(torch.int64)
    distances = (codes - tensor.zero_point.reshape(-1, 1)).to(torch.float32)
    restored = distances * tensor.scale.reshape(-1, 1)
    return torch.equal(from_rows(restored, tuple(values.shape), spec.cut), values)


def _dequantize_stack(
    builder: NodeBuilder, tensor: QuantizedTensor, kind: IntegerType, *, ahead: bool
) -> ir.Value:
    """Write a transposed convolution's weight with groups, whose scales are along two axes.

    DequantizeLinear has one axis, so its scale is 1 here, and its product with the scales is
    the same float. Without `ahead` it must not be computed when the file is loaded. Runtimes
    never do that with DequantizeLinear.
    """
    assert tensor.codes is not None
    shape = tensor.codes.shape
    scale_shape = (shape[0], shape[1], *(1,) * (len(shape) - 2))
    scale = _spread_groups(tensor.scale, tensor.spec, scale_shape)
    zero_point = _spread_groups(tensor.zero_point, tensor.spec, scale_shape)
    stored = builder.constant("codes", tensor.codes, kind.data_type)
    if ahead:
        floats = builder.cast(stored, ir.DataType.FLOAT)
    else:
        one = builder.constant("one", 1.0)
        zero = builder.constant("zero", 0, kind.data_type)
        floats = builder.add("DequantizeLinear", stored, one, zero)
    if zero_point.any():
        floats = builder.add("Sub", floats, builder.constant("zero_point", zero_point))
    return builder.add("Mul", floats, builder.constant("scale", scale))


def _spread_groups(values: Tensor, spec: QuantizationSpec, shape: tuple[int, ...]) -> Tensor:
    """Return the scales of a stack along its first two axes, in a shape that broadcasts."""
    rows = values.reshape(-1, 1).expand(-1, spec.group_size or 1)
    return from_rows(rows.contiguous(), shape, spec.cut)


def _along_axis(scales: Tensor, spec: QuantizationSpec) -> Tensor:
    """Return scales with groups along the axis that is cut, as in ONNX."""
    if spec.qscheme == "per_group" and spec.ch_axis is not None:
        return scales.movedim(-1, spec.ch_axis)
    return scales


def _stored_type(tensor: QuantizedTensor, opset: int) -> IntegerType | None:
    """Return the type of the codes; None if there is none.

    DequantizeLinear takes 32-bit codes without a zero point, and groups from set 21 on.
    """
    spec = tensor.spec
    if spec.dtype != "int" or (spec.qscheme == "per_group" and opset < BLOCK_SIZE_OPSET):
        return None
    is_int8 = tensor.codes is not None and tensor.codes.dtype == torch.int8
    # Codes that were shifted to int8 have a zero point, which no spec of signed codes has.
    if spec.bit_width == 8 and is_int8:
        return INT8
    narrow = weight_type(spec, opset)
    if narrow is not None or tensor.zero_point.any() or spec.quant_max > ONNX_INT32.high:
        return narrow
    return ONNX_INT32


def packed_product(builder: NodeBuilder, weights: QuantizedTensor, x: ir.Value) -> ir.Value:
    """Add the product of `x` with weights transposed as MatMulNBits, called `builder.name`.

    Args:
        weights: [outputs, inputs], codes of 8 bits or fewer in groups of inputs.

    Source: the operator's documentation in ONNX Runtime, ContribOperators.md.
    """
    spec, codes = weights.spec, weights.codes
    assert codes is not None
    outputs, inputs = codes.shape
    is_whole = spec.group_size in (None, -1)
    block = inputs if is_whole else int(spec.group_size or 0)
    bits = next(width for width in _PACKED_BITS if spec.bit_width <= width)
    # MatMulNBits has unsigned codes.
    middle = 1 << (bits - 1) if spec.quant_min < 0 else 0
    count = -(-inputs // block)
    unsigned = codes.to(torch.int32) + middle
    padded = torch.nn.functional.pad(unsigned, (0, count * block - inputs), value=middle)
    blocks = padded.view(outputs, count, block).to(torch.uint8)
    operands = [
        x,
        builder.constant("codes", pack_bits(blocks, bits), ir.DataType.UINT8),
        builder.constant("scale", weights.scale.reshape(outputs, count)),
    ]
    zero_points = weights.zero_point.reshape(outputs, count) + middle
    default_zero_point = 1 << (bits - 1)
    if (zero_points != default_zero_point).any():
        packed = pack_bits(zero_points.to(torch.uint8), bits)
        operands.append(builder.constant("zero_point", packed, ir.DataType.UINT8))
    return builder.add(
        "MatMulNBits",
        *operands,
        domain=PACKED_DOMAIN,
        node_name=builder.name,
        K=inputs,
        N=outputs,
        bits=bits,
        block_size=block,
        accuracy_level=_INT8_ACTIVATIONS,
    )
