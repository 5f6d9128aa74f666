"""Writes biases as engines add them: as codes that are added to sums of integers, or as floats
that ONNX Runtime's optimizer cannot look into.

Between quantized values it would quantize float weights itself, to 8 bits per tensor, and
biases that do not fit int32 to other values. It does neither if the bias is computed, and it
never computes DequantizeLinear ahead.

OpenVINO takes the size of a batch from the output of a convolution before its bias. If the sum
with the bias is quantized, it then adds another bias. A size that is computed as a sum can only
be taken from that sum.
"""

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import NodeBuilder, producer_of, replace_node
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.passes.moves import PASSED_OPERATORS

# The operators with a bias, and the axis of the weight that outputs lie along.
_OUTPUT_AXES = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}


def write_sum_biases(model: ir.Model, lowering: Lowering) -> None:
    """Replace float biases by codes. torch.onnx has dropped biases of zeros."""
    for node in list(model.graph):
        name = node.name or ""
        has_bias = node.op_type in _OUTPUT_AXES and len(node.inputs) == 3
        if has_bias and name in lowering.biases:
            bias = lowering.biases[name]
            builder = NodeBuilder(f"{name}.bias", node)
            codes = builder.constant("codes", bias.codes, ir.DataType.INT32)
            scale = builder.constant("scale", bias.step)
            # Without it, AIMET takes the type of the codes for uint8
            zero_points = torch.zeros_like(bias.step)
            zero_point = builder.constant("zero_point", zero_points, ir.DataType.INT32)
            value = builder.add("DequantizeLinear", codes, scale, zero_point, axis=0)
            node.replace_input_with(2, value)


def hide_float_biases(model: ir.Model, lowering: Lowering) -> None:
    """Add computed zeros to the biases of `float_layers`, and of layers with float weights."""
    for node in list(model.graph):
        if node.op_type not in _OUTPUT_AXES:
            continue
        has_bias = len(node.inputs) == 3
        count = _channels_of_float_weight(node)
        if count is None and has_bias and node.name in lowering.float_layers:
            count = _sizes(node.inputs[2])[0]
        if count is None:
            continue
        builder = NodeBuilder(f"{node.name}.bias", node)
        codes = builder.constant("zeros", torch.zeros(count), ir.DataType.INT32)
        one = builder.constant("one", 1.0)
        zero_point = builder.constant("zeros_zero_point", 0, ir.DataType.INT32)
        zeros = builder.add("DequantizeLinear", codes, one, zero_point)
        bias = zeros
        if has_bias:
            bias = builder.add("Add", node.inputs[2], zeros)
        else:
            node.resize_inputs(3)
        node.replace_input_with(2, bias)


def _channels_of_float_weight(node: ir.Node) -> int | None:
    """Return the number of outputs if a node multiplies quantized values by float weights."""
    x, weight = node.inputs[:2]
    if producer_of(x, "DequantizeLinear") is None or weight is None:
        return None
    if not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT:
        return None
    sizes = _sizes(weight)
    if node.attributes.get_int("transB", 0):
        return sizes[0]
    channels = sizes[_OUTPUT_AXES[node.op_type]]
    if node.op_type == "ConvTranspose":
        channels *= node.attributes.get_int("group", 1)
    return channels


def _sizes(value: ir.Value | None) -> list[int]:
    """Return the shape of an initializer."""
    assert value is not None and value.shape is not None
    return [size for size in value.shape if isinstance(size, int)]


def write_sizes_as_sums(model: ir.Model, lowering: Lowering) -> None:
    """Write single sizes as sums if the sum of a convolution and its bias is quantized."""
    if not any(_quantizes_sum(node) for node in model.graph):
        return
    for node in list(model.graph):
        axis = _single_axis(node) if node.op_type == "Shape" else None
        if axis is not None:
            replace_node(node, _as_sum(node, axis))


def _quantizes_sum(node: ir.Node) -> bool:
    """Return whether the output of a convolution with a bias is quantized without an operator
    between.
    """
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) != 3:
        return False
    waiting = list(node.outputs)
    while waiting:
        for reader in waiting.pop().consumers():
            if reader.op_type == "QuantizeLinear":
                return True
            if reader.op_type in PASSED_OPERATORS:
                waiting += reader.outputs
    return False


def _single_axis(node: ir.Node) -> int | None:
    """Return the axis whose size a Shape reads; None if it reads several."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    rank = len(source.shape)
    start = node.attributes.get_int("start", 0)
    axes = range(rank)[start : node.attributes.get_int("end", rank)]
    return axes[0] if len(axes) == 1 else None


def _as_sum(node: ir.Node, axis: int) -> ir.Value:
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    builder = NodeBuilder(f"{node.outputs[0].name}.summed", node)
    mask = [0] * len(source.shape)
    mask[axis] = 1
    sizes = builder.add("Shape", source)
    single = builder.add("Mul", sizes, builder.indices("picked", mask))
    along = builder.indices("axis", [0])
    return builder.add("ReduceSum", single, along, keepdims=1)
