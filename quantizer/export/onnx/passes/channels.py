"""Pads the input channels of first convolutions, for which ONNX Runtime then has fast kernels.

Its kernels on x86 that read codes and int8 weights directly take input channels in fours. For
other numbers of channels it first copies each window of the input. Channels of zero weights
change no sum.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib/convsym.cpp, MlasConvSymPackWSize.
"""

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    is_quantized,
    producer_of,
    remove_node,
)
from quantizer.export.onnx.int8_weights import missing_channels
from quantizer.export.onnx.marks import Lowering


def pad_channels(
    model: ir.Model,
    lowering: Lowering,
) -> None:
    """Pad the codes and int8 weights of convolutions with few input channels."""
    for node in list(model.graph):
        if node.op_type != "Conv" or not is_quantized(node.outputs[0]):
            continue
        x = producer_of(node.inputs[0], "DequantizeLinear")
        weights = producer_of(node.inputs[1], "DequantizeLinear")
        if x is not None and weights is not None:
            _pad(node, x, weights)


def _pad(conv: ir.Node, x: ir.Node, weights: ir.Node) -> None:
    """Pad the codes that are dequantized by `x` and `weights` for a convolution."""
    codes = array_of(weights.inputs[0])
    zero_points = array_of(weights.inputs[2])
    if codes is None or codes.dtype != "int8" or zero_points is None or zero_points.any():
        return
    missing = missing_channels(codes.shape, conv.attributes.get_int("group", 1))
    if not missing:
        return
    builder = NodeBuilder(f"{conv.name}.channels", conv)
    values, scale, zero_point = x.inputs
    amounts = builder.indices("amounts", [0, 0, 0, 0, 0, missing, 0, 0])
    padded = builder.add("Pad", values, amounts, zero_point)
    conv.replace_input_with(0, builder.add("DequantizeLinear", padded, scale, zero_point))
    wide = torch.nn.functional.pad(torch.from_numpy(codes), (0, 0, 0, 0, 0, missing))
    stored = builder.constant("codes", wide, ir.DataType.INT8)
    attributes = {name: attribute.value for name, attribute in weights.attributes.items()}
    factors = builder.add("DequantizeLinear", stored, *weights.inputs[1:], **attributes)
    conv.replace_input_with(1, factors)
    for node in (x, weights):
        if not node.outputs[0].uses():
            remove_node(node)
