"""An activation quantized with the range of each call, as ONNX nodes: between floats, or in a
product of integers.
"""

import torch
from onnx import NodeProto, TensorProto

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx.nodes import FLOATS, Emission, rounded
from quantizer.export.onnx.tensors import UINT8
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.qparams import SMALLEST_SCALE
from quantizer.observers import code_range_of

MIDDLE = 128
"""What symmetric codes of 8 bits are stored above: ONNX Runtime multiplies UINT8 activations
forty times as fast.
"""


def quantize_dynamic(
    name: str, spec: QuantizationSpec, x: str, y: str, rank: int, *, in_floats: bool = False
) -> Emission:
    """Nodes from value `x`, of `rank` dimensions, to `y`, which is `x` quantized and
    dequantized.

    Over the whole tensor, integers of 8 bits or fewer become DynamicQuantizeLinear, or
    QuantizeLinear with a scale that is computed, and DequantizeLinear, which ONNX Runtime makes
    one kernel with a product after them; `in_floats` leaves them out.
    """
    emission = Emission(name)
    if in_floats or spec.qscheme != "per_tensor" or spec.dtype != "int" or spec.bit_width > 8:
        values, scale, _ = _rounded(emission, spec, x, rank)
        emission.add("Mul", values, scale, output=y)
        return emission
    if not spec.symmetric and spec.bit_width == 8 and spec.round_mode == "half_even":
        emission.add("DynamicQuantizeLinear", x)
        emission.nodes[-1].output.extend([f"{name}.scale", f"{name}.zero_point"])
        emission.add("DequantizeLinear", *emission.nodes[-1].output, output=y)
        return emission
    if spec.symmetric and spec.round_mode == "half_even":
        scale, zero_point = _scale(emission, spec, *_range(emission, spec, x, rank)), None
    else:
        values, scale, zero_point = _rounded(emission, spec, x, rank)
        x = emission.add("Mul", values, scale)
    offset = MIDDLE if spec.quant_min < 0 else 0
    zero = emission.codes("zero_point", torch.tensor(offset), UINT8)
    if zero_point is not None:
        zero = emission.add("Cast", zero_point, to=TensorProto.UINT8)
    codes = emission.add("QuantizeLinear", x, scale, zero)
    ends = spec.quant_min + offset, spec.quant_max + offset
    if ends != (UINT8.low, UINT8.high):
        parts = zip(("low", "high"), map(torch.tensor, ends), strict=True)
        codes = emission.add(
            "Clip", codes, *(emission.codes(part, end, UINT8) for part, end in parts)
        )
    emission.add("DequantizeLinear", codes, scale, zero, output=y)
    return emission


def quantize_rows(name: str, spec: QuantizationSpec, x: str, y: str, rank: int) -> Emission:
    """Nodes from value `x`, of `rank` dimensions, to `y`, its codes less MIDDLE, as floats that
    are read as integers.

    The scale of each row is `y.scale`; asymmetric codes have their zero point, less MIDDLE, as
    `y.zero_point`.
    """
    emission = Emission(name)
    values, scale, zero_point = _rounded(emission, spec, x, rank)
    emission.add("Identity", scale, output=f"{y}.scale")
    middle = emission.constant("middle", MIDDLE)
    if zero_point is not None:
        emission.add("Sub", zero_point, middle, output=f"{y}.zero_point")
    offset = middle if zero_point is None else zero_point
    codes = emission.add("Cast", emission.add("Add", values, offset), to=TensorProto.UINT8)
    unit, zero = (
        emission.constant("unit", 1.0),
        emission.codes("zero_point", torch.tensor(MIDDLE), UINT8),
    )
    emission.add("DequantizeLinear", codes, unit, zero, output=y)
    return emission


def scale_rows(
    name: str, spec: QuantizationSpec, weights: QuantizedTensor, product: NodeProto
) -> Emission:
    """A product of `quantize_rows` with weights, [inputs, outputs], and what makes it that of
    the quantized values.

    One scale for each row cannot be part of an integer kernel, so it is multiplied afterwards,
    as is what a zero point adds to each sum.
    """
    emission, (x, weight), (y,) = Emission(name), product.input, product.output
    sums = emission.add("MatMul", x, weight)
    emission.nodes[-1].name = name
    if not spec.symmetric:
        assert weights.codes is not None
        codes = weights.codes.to(torch.float64) - weights.zero_point.reshape(-1, 1)
        columns = emission.constant("columns", codes.sum(1) * weights.scale)
        sums = emission.add("Sub", sums, emission.add("Mul", f"{x}.zero_point", columns))
    emission.add("Mul", sums, f"{x}.scale", output=y)
    return emission


def multiplies_integers(spec: QuantizationSpec) -> bool:
    """Whether rows of such an activation have codes for `quantize_rows`."""
    return (
        spec.is_dynamic
        and spec.qscheme == "per_token"
        and spec.dtype == "int"
        and spec.bit_width <= 8
    )


def _rounded(
    emission: Emission, spec: QuantizationSpec, x: str, rank: int
) -> tuple[str, str, str | None]:
    """`x` in units of its scale, rounded; the scale; and the zero point, a float, where there
    is one.
    """
    low, high = _range(emission, spec, x, rank)
    scale = _scale(emission, spec, low, high)
    units = emission.add("Div", x, scale)
    if spec.dtype != "int":
        largest = FLOAT_FORMATS[spec.dtype].largest
        ends = emission.constant("low", -largest), emission.constant("high", largest)
        held = emission.add("Cast", emission.add("Clip", units, *ends), to=FLOATS[spec.dtype])
        return emission.add("Cast", held, to=TensorProto.FLOAT), scale, None
    least, most = (
        emission.constant("least", spec.quant_min),
        emission.constant("most", spec.quant_max),
    )
    if spec.symmetric:
        return (
            rounded(emission, spec.round_mode, emission.add("Clip", units, least, most)),
            scale,
            None,
        )
    distance = emission.add("Neg", emission.add("Round", emission.add("Div", low, scale)))
    zero_point = emission.add("Clip", distance, least, most)
    low, high = (emission.add("Sub", end, zero_point) for end in (least, most))
    return (
        rounded(
            emission,
            spec.round_mode,
            emission.add("Min", emission.add("Max", units, low), high),
        ),
        scale,
        zero_point,
    )


def _range(emission: Emission, spec: QuantizationSpec, x: str, rank: int) -> tuple[str, str]:
    """The least and the greatest value, or zero where all are on one side of it."""
    axes, operators = [], ("ReduceMin", "ReduceMax")
    if spec.ch_axis is not None:
        own = spec.ch_axis % rank
        reduced = (
            [own]
            if spec.qscheme == "per_token"
            else [axis for axis in range(rank) if axis != own]
        )
        axes = [emission.integers("axes", torch.tensor(reduced))]
    low, high = (
        emission.add(operator, x, *axes, keepdims=int(bool(axes))) for operator in operators
    )
    zero = emission.constant("zero", 0.0)
    return emission.add("Min", low, zero), emission.add("Max", high, zero)


def _scale(emission: Emission, spec: QuantizationSpec, low: str, high: str) -> str:
    """The distance of two codes; at least the smallest normal number, as 0 / 0 is nothing."""
    if spec.symmetric:
        span, width = (
            float(code_range_of(spec).largest),
            emission.add("Max", emission.add("Neg", low), high),
        )
    else:
        span, width = float(spec.quant_max - spec.quant_min), emission.add("Sub", high, low)
    step = emission.add("Div", width, emission.constant("span", span))
    return emission.add("Max", step, emission.constant("smallest", SMALLEST_SCALE))
