"""Quantizes an activation with the range of each call, for floats or integer products."""

from dataclasses import dataclass

import onnx_ir as ir
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx.activations import FLOAT8_TYPES, round_units
from quantizer.export.onnx.builder import NodeBuilder
from quantizer.export.onnx.tensors import UINT8
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.formats import SMALLEST_SCALE
from quantizer.observers import code_range_of
from quantizer.tables import NUMBER_FORMATS

_MIDDLE = 128
"""The offset of symmetric 8-bit codes: ONNX Runtime multiplies UINT8 activations 40 times as
fast.
"""


@dataclass(frozen=True)
class QuantizedRows:
    """An activation with a scale for each row.

    Attributes:
        codes: floats that are read as integers, less _MIDDLE.
        scale: of each row.
        zero_point: less _MIDDLE, as a float; None if codes are symmetric.
    """

    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None


_Rounded = tuple[ir.Value, ir.Value, ir.Value | None]
"""An activation rounded in units of its scale, the scale, and the zero point as a float."""


def quantize_dynamic(
    builder: NodeBuilder, spec: QuantizationSpec, x: ir.Value, *, in_floats: bool = False
) -> ir.Value:
    """Add nodes that quantize and dequantize `x`; return the result.

    Integers of at most 8 bits with one range for the tensor become DynamicQuantizeLinear, or
    QuantizeLinear with a computed scale, and DequantizeLinear. ONNX Runtime fuses these with
    the product after them. `in_floats` leaves them out.
    """
    is_narrow = spec.dtype == "int" and spec.bit_width <= 8
    if in_floats or spec.qscheme != "per_tensor" or not is_narrow:
        units, scale, _ = _rounded(builder, spec, x)
        return builder.add("Mul", units, scale)
    is_half_even = spec.round_mode == "half_even"
    if not spec.symmetric and spec.bit_width == 8 and is_half_even:
        quantize = builder.add("DynamicQuantizeLinear", x).producer()
        assert quantize is not None
        return builder.add("DequantizeLinear", *quantize.outputs)
    zero_point: ir.Value | None = None
    if spec.symmetric and is_half_even:
        low, high = _range(builder, spec, x)
        scale = _scale(builder, spec, low, high)
    else:
        units, scale, zero_point = _rounded(builder, spec, x)
        x = builder.add("Mul", units, scale)
    offset = _MIDDLE if spec.quant_min < 0 else 0
    if zero_point is None:
        zero = builder.constant("zero_point", offset, UINT8.data_type)
    else:
        zero = builder.cast(zero_point, ir.DataType.UINT8)
    codes = builder.add("QuantizeLinear", x, scale, zero)
    least = spec.quant_min + offset
    most = spec.quant_max + offset
    if (least, most) != (UINT8.low, UINT8.high):
        codes = builder.clip(codes, least, most, UINT8.data_type)
    return builder.add("DequantizeLinear", codes, scale, zero)


def quantize_row_codes(
    builder: NodeBuilder, spec: QuantizationSpec, x: ir.Value
) -> QuantizedRows:
    """Add nodes that quantize each row of `x`, for `scale_rows`."""
    units, scale, offset = _rounded(builder, spec, x)
    middle = builder.constant("middle", _MIDDLE)
    zero_point: ir.Value | None = None
    if offset is not None:
        zero_point = builder.add("Sub", offset, middle)
    shifted = builder.add("Add", units, offset or middle)
    codes = builder.cast(shifted, ir.DataType.UINT8)
    unit = builder.constant("unit", 1.0)
    zero = builder.constant("zero_point", _MIDDLE, UINT8.data_type)
    floats = builder.add("DequantizeLinear", codes, unit, zero)
    return QuantizedRows(floats, scale, zero_point)


def scale_rows(
    builder: NodeBuilder, rows: QuantizedRows, weights: QuantizedTensor, weight: ir.Value
) -> ir.Value:
    """Add the product of rows with a weight, [inputs, outputs]; return that of the values.

    One scale for each row cannot be part of an integer kernel, so it is multiplied afterwards,
    and so is what a zero point adds to each sum. The product's node is called `builder.name`.
    """
    sums = builder.add("MatMul", rows.codes, weight, node_name=builder.name)
    if rows.zero_point is not None:
        assert weights.codes is not None
        codes = weights.codes.to(torch.float64) - weights.zero_point.reshape(-1, 1)
        columns = builder.constant("columns", codes.sum(1) * weights.scale)
        offsets = builder.add("Mul", rows.zero_point, columns)
        sums = builder.add("Sub", sums, offsets)
    return builder.add("Mul", sums, rows.scale)


def has_row_codes(spec: QuantizationSpec) -> bool:
    """Return whether rows of such an activation have codes for `quantize_row_codes`."""
    is_narrow = spec.dtype == "int" and spec.bit_width <= 8
    return spec.is_dynamic and spec.qscheme == "per_token" and is_narrow


def _rounded(builder: NodeBuilder, spec: QuantizationSpec, x: ir.Value) -> _Rounded:
    """Add nodes that round a value with a scale that they compute from it."""
    low, high = _range(builder, spec, x)
    scale = _scale(builder, spec, low, high)
    units = builder.add("Div", x, scale)
    if spec.dtype != "int":
        largest = NUMBER_FORMATS[spec.dtype].largest
        codes = builder.cast(builder.clip(units, -largest, largest), FLOAT8_TYPES[spec.dtype])
        floats = builder.cast(codes, ir.DataType.FLOAT)
        return floats, scale, None
    least = builder.constant("least", spec.quant_min)
    most = builder.constant("most", spec.quant_max)
    zero_point: ir.Value | None = None
    if spec.symmetric:
        clipped = builder.add("Clip", units, least, most)
    else:
        units_of_low = builder.add("Div", low, scale)
        rounded_low = builder.add("Round", units_of_low)
        distance = builder.add("Neg", rounded_low)
        zero_point = builder.add("Clip", distance, least, most)
        least = builder.add("Sub", least, zero_point)
        most = builder.add("Sub", most, zero_point)
        at_least = builder.add("Max", units, least)
        clipped = builder.add("Min", at_least, most)
    return round_units(builder, spec.round_mode, clipped), scale, zero_point


def _range(
    builder: NodeBuilder, spec: QuantizationSpec, x: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the least and the greatest value, with zero in the range."""
    inputs = [x]
    if spec.ch_axis is not None:
        assert x.shape is not None
        rank = len(x.shape)
        axis = spec.ch_axis % rank
        axes = [axis]
        if spec.qscheme != "per_token":
            axes = [other for other in range(rank) if other != axis]
        inputs.append(builder.indices("axes", axes))
    keepdims = len(inputs) - 1
    low = builder.add("ReduceMin", *inputs, keepdims=keepdims)
    high = builder.add("ReduceMax", *inputs, keepdims=keepdims)
    zero = builder.constant("zero", 0.0)
    return builder.add("Min", low, zero), builder.add("Max", high, zero)


def _scale(
    builder: NodeBuilder, spec: QuantizationSpec, low: ir.Value, high: ir.Value
) -> ir.Value:
    """Return the distance of two codes, at least the smallest normal number: 0 / 0 is NaN."""
    if spec.symmetric:
        span = float(code_range_of(spec).largest)
        width = builder.add("Max", builder.add("Neg", low), high)
    else:
        span = float(spec.quant_max - spec.quant_min)
        width = builder.add("Sub", high, low)
    step = builder.add("Div", width, builder.constant("span", span))
    return builder.add("Max", step, builder.constant("smallest", SMALLEST_SCALE))
