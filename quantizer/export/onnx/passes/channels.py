"""Pads the input channels of first convolutions, for which ONNX Runtime then has fast kernels.

Its kernels on x86 that read codes and int8 weights directly take input channels in fours. For
other numbers of channels it first copies each window of the input. Channels of zero weights
change no sum.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib/convsym.cpp, MlasConvSymPackWSize.
"""

from typing import Any

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


def pad_channels(model: ir.Model, lowering: Lowering) -> None:
    """Pad the codes and int8 weights of convolutions with few input channels."""
    for node in list(model.graph):
        if node.op_type != "Conv":
            continue
        if not is_quantized(node.outputs[0]):
            continue
        x, weights = node.inputs[:2]
        of_x = producer_of(x, "DequantizeLinear")
        of_weights = producer_of(weights, "DequantizeLinear")
        if of_x is None or of_weights is None:
            continue
        _pad(node, of_x, of_weights)


def _pad(conv: ir.Node, of_x: ir.Node, of_weights: ir.Node) -> None:
    """Pad the operands of a convolution.

    Args:
        of_x: dequantizes its input.
        of_weights: dequantizes its weights.
    """
    stored, *factors = of_weights.inputs
    codes = array_of(stored)
    zero_points = array_of(factors[1])
    if codes is None or zero_points is None:
        return
    if codes.dtype != "int8" or zero_points.any():
        return
    groups = conv.attributes.get_int("group", 1)
    missing = missing_channels(codes.shape, groups)
    if not missing:
        return
    builder = NodeBuilder(f"{conv.name}.channels", conv)
    values, scale, zero_point = of_x.inputs
    amounts = builder.indices("amounts", [0, 0, 0, 0, 0, missing, 0, 0])
    padded = builder.add("Pad", values, amounts, zero_point)
    x = builder.add("DequantizeLinear", padded, scale, zero_point)
    conv.replace_input_with(0, x)
    wide = torch.nn.functional.pad(torch.from_numpy(codes), (0, 0, 0, 0, 0, missing))
    wide_codes = builder.constant("codes", wide, ir.DataType.INT8)
    attributes: dict[str, Any] = {}
    for name, attribute in of_weights.attributes.items():
        attributes[name] = attribute.value
    weights = builder.add("DequantizeLinear", wide_codes, *factors, **attributes)
    conv.replace_input_with(1, weights)
    for node in (of_x, of_weights):
        if not node.outputs[0].uses():
            remove_node(node)
