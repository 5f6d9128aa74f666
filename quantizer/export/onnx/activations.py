"""Quantizes one activation with ONNX operators that give test mode's values exactly, with a
static range or with that of each call.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.arithmetic import is_narrow
from quantizer.export.exporter import Reason
from quantizer.export.limits import ONE_SCALE, Limits, kind_of, of_bits, of_formats, rounded_by
from quantizer.export.onnx.builder import NodeBuilder
from quantizer.export.onnx.lowering import (
    EIGHT_BITS,
    UINT8,
    Conventions,
    Lowering,
    activation_type,
)
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.formats import SMALLEST_SCALE
from quantizer.observers import code_range_of
from quantizer.tables import NUMBER_FORMATS

_CASTS = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
# The scaled formats of QuantizeLinear, and the first operator set that has them.
FLOAT8_TYPES = {"fp8_e4m3": ir.DataType.FLOAT8E4M3FN, "fp8_e5m2": ir.DataType.FLOAT8E5M2}
_FLOAT8_OPSET = 19
UNBOUNDED = (-math.inf, math.inf)
_HALF_UP = (("Mul", 2.0), ("Floor", None), ("Mul", 0.5), ("Ceil", None))
_HALF_DOWN = (("Mul", 2.0), ("Ceil", None), ("Mul", 0.5), ("Floor", None))


Bounds = tuple[float, float]


@dataclass(frozen=True)
class _Rounding:
    """A rounding mode as operators with their second operand.

    `on_magnitude` means that the sign is removed before and restored after them.
    """

    on_magnitude: bool
    steps: tuple[tuple[str, float | None], ...]


_ROUNDINGS: Mapping[str, _Rounding] = {
    "half_up": _Rounding(on_magnitude=False, steps=_HALF_UP),
    "half_down": _Rounding(on_magnitude=True, steps=_HALF_DOWN),
    "std_round": _Rounding(on_magnitude=True, steps=_HALF_UP),
    "floor": _Rounding(on_magnitude=False, steps=(("Floor", None),)),
}
"""The modes of numerics.rounding except half_even, which is that of QuantizeLinear."""
_LIMITS = Limits(
    "ONNX",
    "use <--deploy pt2>",
    (
        of_formats("int", *FLOAT8_TYPES),
        ONE_SCALE,
        of_bits(range(1, 17)),
        rounded_by(("half_even", *_ROUNDINGS)),
    ),
)


def activation_reasons(
    spec: QuantizationSpec, dtype: torch.dtype | None, opset: int, conventions: Conventions
) -> Iterator[Reason]:
    """Yield why ONNX cannot quantize an activation as test mode does."""
    if dtype == torch.float64:
        yield f"is {dtype}", "compute it in float32, or leave it float"
    elif spec.is_scaled and spec.is_dynamic and spec.qscheme == "per_group":
        why = "has dynamic ranges of groups"
        yield why, f"set its qscheme to per_token, or {_LIMITS.otherwise}"
    elif spec.is_scaled and spec.is_dynamic and spec.scale_type != "float":
        why = "has a dynamic range with powers of two"
        yield why, f"set scale_type to float there, or {_LIMITS.otherwise}"
    elif spec.is_scaled:
        reasons = list(_LIMITS.reasons(spec))
        yield from reasons
        if not reasons and not _has_type(spec, opset, conventions):
            why = f"{kind_of(spec)}, which operator set {opset} lacks"
            yield why, "set onnx_opset_version to 21 or -1"


def _has_type(spec: QuantizationSpec, opset: int, conventions: Conventions) -> bool:
    """Return whether an operator set has a type for the codes of an activation."""
    if spec.dtype in FLOAT8_TYPES:
        return opset >= _FLOAT8_OPSET
    return bool(spec.is_dynamic) or activation_type(spec, opset, conventions) is not None


def takes_bounds(tensor: QuantizedTensor, bounds: Bounds, lowering: Lowering) -> bool:
    """Return whether a quantization can cut values off at `bounds`, so that no operator need
    do it before.

    Codes of 8 bits can be clipped after QuantizeLinear. Where the conventions have no Clip
    of codes, the bounds must be those of the codes' type.
    """
    spec = tensor.spec
    if spec.dtype != "int" or spec.round_mode != "half_even":
        return False
    stored = activation_type(spec, lowering.opset, lowering.conventions)
    if stored is None:
        return False
    kind, offset = stored
    if lowering.conventions.is_for_kernels:
        return kind.data_type in EIGHT_BITS
    ends = _code_ends(tensor, bounds) + offset
    return ends.tolist() == [kind.low, kind.high]


def _code_ends(tensor: QuantizedTensor, bounds: Bounds) -> Tensor:
    """Return the codes of the ends of a range, as far as there are such codes."""
    spec = tensor.spec
    zero_point = int(tensor.zero_point)
    ends = (torch.tensor(bounds) / tensor.scale).round()
    ends = ends.clamp(spec.quant_min - zero_point, spec.quant_max - zero_point)
    return ends + zero_point


def quantize_activation(
    builder: NodeBuilder,
    tensor: QuantizedTensor,
    x: ir.Value,
    lowering: Lowering,
    *,
    bounds: Bounds = UNBOUNDED,
    in_floats: bool = False,
    apart: bool = False,
) -> ir.Value:
    """Add nodes that clip `x` to `bounds`, quantize and dequantize it; return the result.

    Integers become QuantizeLinear and DequantizeLinear. Codes are clipped in between if they
    end before those of their integer type. Rounding is monotone, so this equals clipping
    before, and it keeps no runtime from computing `x` in integers. A rounding mode other than
    half_even is applied before, so that QuantizeLinear meets no half-way point.

    Args:
        tensor: how to quantize; `activation_reasons` has nothing against it.
        lowering: of the file.
        bounds: `takes_bounds` has nothing against them.
        in_floats: leave QuantizeLinear and DequantizeLinear out.
        apart: `x` is not negative, and no runtime may fuse its operator with the quantization.
    """
    spec = tensor.spec
    if not spec.is_scaled:
        return _cast(builder, spec.dtype, x)
    if spec.dtype != "int":
        return _quantize_float8(builder, tensor, x)
    is_rounded_apart = spec.round_mode != "half_even"
    scale = builder.constant("scale", tensor.scale)
    codes_of_ends = _code_ends(tensor, bounds)
    ends = codes_of_ends - int(tensor.zero_point)
    if in_floats or is_rounded_apart:
        units = builder.clip(builder.add("Div", x, scale), ends[0], ends[1])
        x = builder.add("Mul", round_units(builder, spec.round_mode, units), scale)
        if in_floats:
            return x
    stored = activation_type(spec, lowering.opset, lowering.conventions)
    # `activation_reasons` refuses other specs.
    assert stored is not None
    kind, offset = stored
    code_ends = codes_of_ends + offset
    is_clipped = not is_rounded_apart and code_ends.tolist() != [kind.low, kind.high]
    # Engines that want QuantizeLinear alone cut values off at the ends of the type.
    is_clipped = is_clipped and lowering.conventions.is_for_kernels
    is_clipped_in_codes = is_clipped and kind.data_type in EIGHT_BITS
    if is_clipped and not is_clipped_in_codes:
        low, high = ends * tensor.scale
        x = builder.clip(x, low, high)
    if apart and not is_rounded_apart:
        x = builder.add("Max", x, builder.constant("zero", 0.0))
    zero = builder.constant("zero_point", tensor.zero_point + offset, kind.data_type)
    codes = builder.add("QuantizeLinear", x, scale, zero)
    if is_clipped_in_codes:
        codes = builder.clip(codes, code_ends[0], code_ends[1], kind.data_type)
    return builder.add("DequantizeLinear", codes, scale, zero)


def _quantize_float8(builder: NodeBuilder, tensor: QuantizedTensor, x: ir.Value) -> ir.Value:
    """Add QuantizeLinear to an 8-bit float format.

    Values outside are cut off before, as runtimes differ in what they make of them. Max and Min
    do this instead of Clip, which ONNX Runtime's optimizer cannot take before these formats.
    """
    data_type = FLOAT8_TYPES[tensor.spec.dtype]
    largest = NUMBER_FORMATS[tensor.spec.dtype].largest
    scale = builder.constant("scale", tensor.scale)
    x = builder.add("Max", x, builder.constant("low", -largest * tensor.scale))
    x = builder.add("Min", x, builder.constant("high", largest * tensor.scale))
    zero = builder.constant("zero_point", 0.0, data_type)
    return builder.requantized(x, scale, zero)


def _cast(builder: NodeBuilder, dtype: str, x: ir.Value) -> ir.Value:
    if dtype == "float32":
        return builder.add("Identity", x)
    largest = NUMBER_FORMATS[dtype].largest
    clipped = builder.clip(x, -largest, largest)
    narrow = builder.cast(clipped, _CASTS[dtype])
    return builder.cast(narrow, ir.DataType.FLOAT)


def round_units(builder: NodeBuilder, mode: str, x: ir.Value) -> ir.Value:
    """Add nodes that round a value to integers.

    Args:
        builder: of the graph.
        mode: a mode of numerics.rounding that `activation_reasons` has not refused.
        x: the value.
    """
    if mode == "half_even":
        return builder.add("Round", x)
    rounding = _ROUNDINGS[mode]
    signed = x
    if rounding.on_magnitude:
        x = builder.add("Abs", signed)
    for index, (op_type, operand) in enumerate(rounding.steps):
        if operand is None:
            x = builder.add(op_type, x)
        else:
            x = builder.add(op_type, x, builder.constant(f"factor_{index}", operand))
    if rounding.on_magnitude:
        x = builder.add("Mul", x, builder.add("Sign", signed))
    return x


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
    if in_floats or spec.qscheme != "per_tensor" or not is_narrow(spec):
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
    return bool(spec.is_dynamic) and spec.qscheme == "per_token" and is_narrow(spec)


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
