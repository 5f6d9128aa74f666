"""One tensor's quantization as ONNX nodes that give test mode's values exactly: an
activation's, or a weight's with its codes. Knows no network.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.onnx.tensors import (
    INT8,
    INT32,
    Carrier,
    activation_carrier,
    codes_tensor,
    float_tensor,
    weight_carrier,
)
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.granularity import from_rows, to_rows

_CASTS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
BLOCKS = 21
"""The first operator set whose DequantizeLinear has a block_size."""
FLOATS = {"fp8_e4m3": TensorProto.FLOAT8E4M3FN, "fp8_e5m2": TensorProto.FLOAT8E5M2}
"""The scaled formats that QuantizeLinear has."""
FLOATS_FROM = 19
"""The first operator set that has them."""
UNBOUNDED = (-math.inf, math.inf)
CLIPPED = (TensorProto.INT8, TensorProto.UINT8)
"""The types of codes that ONNX Runtime clips."""
_HALF_UP = (("Mul", 2.0), ("Floor", None), ("Mul", 0.5), ("Ceil", None))
_HALF_DOWN = (("Mul", 2.0), ("Ceil", None), ("Mul", 0.5), ("Floor", None))
_ROUNDINGS: dict[str, tuple[bool, tuple[tuple[str, float | None], ...]]] = {
    "half_up": (False, _HALF_UP),
    "half_down": (True, _HALF_DOWN),
    "std_round": (True, _HALF_UP),
    "floor": (False, (("Floor", None),)),
}
"""The modes of numerics.rounding that QuantizeLinear, which rounds half to even, is not:
whether the magnitude is what is rounded, and the operators with their second operand.
"""


@dataclass
class Emission:
    """Nodes and initializers of one quantization, named after the layer and the role."""

    name: str
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)

    def constant(self, part: str, value: Tensor | float) -> str:
        """A float32 initializer."""
        self.initializers.append(
            float_tensor(f"{self.name}.{part}", torch.as_tensor(value, dtype=torch.float32))
        )
        return self.initializers[-1].name

    def codes(self, part: str, codes: Tensor, carrier: Carrier) -> str:
        """An initializer of codes."""
        self.initializers.append(codes_tensor(f"{self.name}.{part}", codes, carrier))
        return self.initializers[-1].name

    def integers(self, part: str, values: Tensor) -> str:
        """An initializer of int32 or int64, as the tensor is."""
        self.initializers.append(numpy_helper.from_array(values.numpy(), f"{self.name}.{part}"))
        return self.initializers[-1].name

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """A node; returns the name of what it makes."""
        label = f"{self.name}.{len(self.nodes)}.{operator}"
        self.nodes.append(
            helper.make_node(
                operator, list(inputs), [output or label], name=label, **attributes
            )
        )
        return output or label


def refusal(
    spec: QuantizationSpec, dtype: torch.dtype | None, opset: int
) -> tuple[str, str] | None:
    """Why ONNX cannot quantize an activation of a dtype as test mode does, and what to change;
    None if it can.
    """
    if dtype == torch.float64:
        return f"is {dtype}", "compute it in float32, or leave it float"
    if not spec.is_scaled:
        return None
    if spec.is_dynamic and spec.qscheme == "per_group":
        return (
            "has dynamic ranges of groups",
            "set its qscheme to per_token, or use --deploy pt2",
        )
    if spec.is_dynamic and spec.scale_type != "float":
        return (
            "has a dynamic range with powers of two",
            "set scale_type to float there, or use --deploy pt2",
        )
    if spec.dtype in FLOATS:
        if opset < FLOATS_FROM:
            return (
                f"is {spec.dtype}, which operator set {opset} lacks",
                "set onnx_opset_version to 21 or -1",
            )
    elif spec.dtype != "int":
        return (
            f"is {spec.dtype}, which has no exact form",
            "use another format there, or --deploy pt2",
        )
    if spec.ch_axis is not None and not spec.is_dynamic:
        return "is quantized per channel", "set per_channel to false there"
    if spec.dtype == "int" and spec.is_dynamic and spec.bit_width <= 16:
        return None
    if spec.dtype == "int" and spec.bit_width > 16:
        return (
            f"has {spec.bit_width} bits, and QuantizeLinear has 16 at most",
            "set its bit_width to 16 or less",
        )
    if spec.dtype == "int" and activation_carrier(spec, opset) is None:
        return (
            f"has {spec.bit_width} bits, which operator set {opset} lacks",
            "set onnx_opset_version to 21 or -1",
        )
    return None


def clips_codes(spec: QuantizationSpec, opset: int) -> bool:
    """Whether an activation's codes can be clipped after QuantizeLinear."""
    found = (
        activation_carrier(spec, opset)
        if spec.dtype == "int" and spec.round_mode == "half_even"
        else None
    )
    return found is not None and found[0].data_type in CLIPPED


def quantize_activation(
    name: str,
    tensor: QuantizedTensor,
    x: str,
    y: str,
    opset: int,
    bounds: tuple[float, float] = UNBOUNDED,
    *,
    in_floats: bool = False,
    apart: bool = False,
) -> Emission:
    """Nodes from value `x`, cut to `bounds`, to value `y`; `refusal` has nothing against it.

    Integers become QuantizeLinear and DequantizeLinear, with the codes clipped in between where
    they end before those of their integer type: as rounding is monotone, this is the same as
    before, and keeps no runtime from computing what makes `x` in integers. A rounding mode
    other than half_even is applied before, after which QuantizeLinear meets no half-way point;
    `in_floats` leaves the two out. `apart` says that `x` is not negative and that no runtime
    may make one kernel of its operator and this quantization.
    """
    spec, emission = tensor.spec, Emission(name)
    if not spec.is_scaled:
        _cast(emission, spec.dtype, x, y)
        return emission
    if spec.dtype != "int":
        _float(emission, tensor, x, y)
        return emission
    found = activation_carrier(spec, opset)
    assert found is not None  # `refusal` saw to it
    carrier, offset = found
    scale, zero_point = emission.constant("scale", tensor.scale), int(tensor.zero_point)
    ends = (
        (torch.tensor(bounds) / tensor.scale)
        .round()
        .clamp(spec.quant_min - zero_point, spec.quant_max - zero_point)
    )
    clip = None
    if in_floats or spec.round_mode != "half_even":
        x = emission.add("Div", x, scale)
        x = _clipped(emission, x, ends)
        x = emission.add(
            "Mul", rounded(emission, spec.round_mode, x), scale, output=y if in_floats else ""
        )
        if in_floats:
            return emission
    elif (ends + zero_point + offset).tolist() != [carrier.low, carrier.high]:
        clip = ends + zero_point + offset
    if clip is not None and carrier.data_type not in CLIPPED:
        x = _clipped(emission, x, ends * tensor.scale)
        clip = None
    if apart and spec.round_mode == "half_even":
        x = emission.add("Max", x, emission.constant("zero", 0.0))
    zero = emission.codes("zero_point", tensor.zero_point + offset, carrier)
    codes = emission.add("QuantizeLinear", x, scale, zero)
    if clip is not None:
        low, high = (
            emission.codes(part, end, carrier)
            for part, end in zip(("low", "high"), clip, strict=True)
        )
        codes = emission.add("Clip", codes, low, high)
    emission.add("DequantizeLinear", codes, scale, zero, output=y)
    return emission


def _clipped(emission: Emission, x: str, ends: torch.Tensor) -> str:
    """Add a Clip of `x` to the two `ends`, and return its value."""
    low, high = emission.constant("low", ends[0]), emission.constant("high", ends[1])
    return emission.add("Clip", x, low, high)


def _float(emission: Emission, tensor: QuantizedTensor, x: str, y: str) -> None:
    """QuantizeLinear to an 8-bit format; what lies outside is cut off before, as runtimes
    differ in what they make of it, and not by Clip, which ONNX Runtime's optimizer cannot take
    before these formats.
    """
    data_type, largest = FLOATS[tensor.spec.dtype], FLOAT_FORMATS[tensor.spec.dtype].largest
    scale = emission.constant("scale", tensor.scale)
    x = emission.add("Max", x, emission.constant("low", -largest * tensor.scale))
    x = emission.add("Min", x, emission.constant("high", largest * tensor.scale))
    zero = TensorProto(
        name=f"{emission.name}.zero_point", data_type=data_type, dims=[], raw_data=b"\0"
    )
    emission.initializers.append(zero)
    codes = emission.add("QuantizeLinear", x, scale, zero.name)
    emission.add("DequantizeLinear", codes, scale, zero.name, output=y)


def _cast(emission: Emission, dtype: str, x: str, y: str) -> None:
    if dtype == "float32":
        emission.add("Identity", x, output=y)
        return
    largest = FLOAT_FORMATS[dtype].largest
    x = emission.add(
        "Clip", x, emission.constant("low", -largest), emission.constant("high", largest)
    )
    emission.add(
        "Cast", emission.add("Cast", x, to=_CASTS[dtype]), output=y, to=TensorProto.FLOAT
    )


def rounded(emission: Emission, mode: str, x: str) -> str:
    """Nodes that round a value to integers in a mode of numerics.rounding."""
    if mode == "half_even":
        return emission.add("Round", x)
    on_magnitude, steps = _ROUNDINGS[mode]
    sign = emission.add("Sign", x) if on_magnitude else ""
    x = emission.add("Abs", x) if on_magnitude else x
    for index, (operator, operand) in enumerate(steps):
        operands = () if operand is None else (emission.constant(f"factor_{index}", operand),)
        x = emission.add(operator, x, *operands)
    return emission.add("Mul", x, sign) if on_magnitude else x


def quantize_weights(
    name: str,
    tensor: QuantizedTensor,
    values: Tensor,
    y: str,
    opset: int,
    *,
    transposed: bool = False,
    ahead: bool = False,
) -> Emission | None:
    """Codes, scale, zero point and the node that makes `values` of them as `y`, or of both the
    transpose; None where floats have to stay. `ahead` writes nodes that runtimes compute once,
    when they load the file, where they can.

    Floats stay, exact as they are, in floating-point formats, in groups before operator set 21,
    and where float32 cannot compute the value from the code, as of more than 24 bits. `values`
    are what the codes stand for.
    """
    spec, carrier = tensor.spec, _carrier(tensor, opset)
    if carrier is None or tensor.codes is None:
        return None
    cut = spec.cut
    scale, zero_point = tensor.scale.reshape(-1, 1), tensor.zero_point.reshape(-1, 1)
    # As DequantizeLinear computes it: in float32.
    restored = (to_rows(tensor.codes, cut).to(torch.int64) - zero_point).to(
        torch.float32
    ) * scale
    if not torch.equal(from_rows(restored, tuple(values.shape), cut), values):
        return None
    emission = Emission(name)
    if spec.qscheme == "per_channel" and spec.group_size is not None:
        _stack(emission, tensor, y, carrier, ahead=ahead)
        return emission
    codes, scale, zero_point = (
        tensor.codes,
        _placed(tensor.scale, spec),
        _placed(tensor.zero_point, spec),
    )
    attributes = _attributes(spec, values)
    if transposed:
        codes = codes.T
        if spec.qscheme == "per_group":
            scale, zero_point = scale.T, zero_point.T
        attributes |= {"axis": 1 - attributes["axis"]} if attributes else {}
    if ahead and spec.qscheme != "per_group":
        along = (
            [-1 if axis == spec.ch_axis else 1 for axis in range(codes.dim())]
            if spec.ch_axis is not None
            else []
        )
        floats = emission.add(
            "Cast", emission.codes("codes", codes, carrier), to=TensorProto.FLOAT
        )
        if zero_point.any():
            # OpenVINO takes Cast, Sub, Mul for a compressed weight, and misreads one that is
            # cut and joined by gates.
            floats = emission.add(
                "Add", floats, emission.constant("zero_point", -zero_point.reshape(along))
            )
        emission.add("Mul", floats, emission.constant("scale", scale.reshape(along)), output=y)
        return emission
    inputs = [emission.codes("codes", codes, carrier), emission.constant("scale", scale)]
    if carrier is not INT32:
        inputs.append(emission.codes("zero_point", zero_point, carrier))
    emission.add("DequantizeLinear", *inputs, output=y, **attributes)
    return emission


def _stack(
    emission: Emission, tensor: QuantizedTensor, y: str, carrier: Carrier, *, ahead: bool
) -> None:
    """Write a transposed convolution's weight with groups, whose scales lie along two axes.

    DequantizeLinear has one axis, so its scale is 1 here, and its product with the scales is
    the same float. Without `ahead` it must not be computed when the file is loaded, which
    DequantizeLinear never is.
    """
    assert tensor.codes is not None  # `quantize_weights` saw to it
    shape, spec = tuple(tensor.codes.shape), tensor.spec
    first = (shape[0], shape[1], *(1,) * (len(shape) - 2))
    scale, zero_point = (
        _spread(values, spec, first) for values in (tensor.scale, tensor.zero_point)
    )
    floats = emission.codes("codes", tensor.codes, carrier)
    if ahead:
        floats = emission.add("Cast", floats, to=TensorProto.FLOAT)
    else:
        floats = emission.add("DequantizeLinear", floats, emission.constant("one", 1.0))
    if zero_point.any():
        floats = emission.add("Sub", floats, emission.constant("zero_point", zero_point))
    emission.add("Mul", floats, emission.constant("scale", scale), output=y)


def _spread(values: Tensor, spec: QuantizationSpec, shape: tuple[int, ...]) -> Tensor:
    """Return a value of each scale of a stack along its first two axes, in a shape that goes
    with it.
    """
    rows = values.reshape(-1, 1).expand(-1, spec.group_size or 1)
    return from_rows(rows.contiguous(), shape, spec.cut)


def _placed(scales: Tensor, spec: QuantizationSpec) -> Tensor:
    """Scales of groups where ONNX has them: along the axis that is cut."""
    return (
        scales.movedim(-1, spec.ch_axis)
        if spec.qscheme == "per_group" and spec.ch_axis is not None
        else scales
    )


def _attributes(spec: QuantizationSpec, values: Tensor) -> dict[str, int]:
    if spec.ch_axis is None:
        return {}
    if spec.qscheme != "per_group":
        return {"axis": spec.ch_axis}
    whole = spec.group_size in (None, -1)
    return {
        "axis": spec.ch_axis,
        "block_size": values.shape[spec.ch_axis] if whole else int(spec.group_size or 0),
    }


def _carrier(tensor: QuantizedTensor, opset: int) -> Carrier | None:
    """The type of the codes; DequantizeLinear takes 32-bit ones without a zero point, and
    groups from set 21 on.
    """
    if tensor.spec.dtype != "int" or (tensor.spec.qscheme == "per_group" and opset < BLOCKS):
        return None
    # Codes that were shifted to int8 have a zero point, and a spec has no signed codes with
    # one.
    if (
        tensor.spec.bit_width == 8
        and tensor.codes is not None
        and tensor.codes.dtype == torch.int8
    ):
        return INT8
    narrow = weight_carrier(tensor.spec, opset)
    if narrow is not None or tensor.zero_point.any() or tensor.spec.quant_max > INT32.high:
        return narrow
    return INT32
