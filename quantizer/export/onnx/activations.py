"""Quantizes one activation with ONNX operators that give test mode's values exactly."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason
from quantizer.export.limits import ONE_SCALE, Limits, kind_of, of_bits, of_formats, rounded_by
from quantizer.export.onnx.builder import NodeBuilder
from quantizer.export.onnx.conventions import Conventions
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.tensors import EIGHT_BITS, activation_type
from quantizer.nn.quantized_tensor import QuantizedTensor
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
