"""Writes biases as the codes that are added to sums of integers."""

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import NodeBuilder
from quantizer.export.onnx.marks import Lowering

_BIASED = ("Conv", "ConvTranspose", "Gemm")


def write_sum_biases(model: ir.Model, lowering: Lowering) -> None:
    """Replace float biases by codes. torch.onnx has dropped biases of zeros."""
    for node in list(model.graph):
        name = node.name or ""
        has_bias = node.op_type in _BIASED and len(node.inputs) == 3
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
