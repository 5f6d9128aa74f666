"""Makes biases that must stay float something that ONNX Runtime's optimizer cannot look into.

Between quantized values it would quantize float weights itself, to 8 bits per tensor, and
biases that do not fit int32 to other values. It does neither if the bias is computed, and it
never computes DequantizeLinear ahead.
"""

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import NodeBuilder, producer_of
from quantizer.export.onnx.marks import Lowering

# The axis of the weight that outputs lie along, of operators whose weights stay float.
_OUTPUT_AXES = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}


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
