"""Quantizes values between operators that only move or cut them.

Engines that run an operator in integers between DequantizeLinear and QuantizeLinear only want
these around each operator. With the same scale and zero point, no value changes: moves give
the codes that they take, and cutting off is monotone, as rounding is.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    is_constant,
    producer_of,
    redirect,
)
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.passes.moves import only_moves, requantize

_CUTTING = ("Relu", "Clip")
_SIGNED = (ir.DataType.INT8, ir.DataType.INT16)


def requantize_rectified(model: ir.Model, lowering: Lowering) -> None:
    """Quantize what a ReLU makes of dequantized values, which has their codes."""
    for node in list(model.graph):
        if node.op_type == "Relu":
            _quantize_after(node)


def wrap_operators(model: ir.Model, lowering: Lowering) -> None:
    """Quantize the inputs and the outputs of moves, and the inputs of what cuts off."""
    if not lowering.conventions.wraps_operators:
        return
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear":
            _quantize_before(node)
    for node in list(model.graph):
        if only_moves(node):
            _quantize_after(node)


def _quantize_before(quantize: ir.Node) -> None:
    """Quantize what the operators before a quantization cut or move, as long as only they read
    it.
    """
    qparams = quantize.inputs[1:]
    if not all(is_constant(value) for value in qparams):
        return
    value = quantize.inputs[0]
    while value is not None:
        operator = value.producer()
        is_only = len(value.uses()) == 1 and not value.is_graph_output()
        if operator is None or not is_only:
            return
        if not only_moves(operator) and not _is_cut_apart(operator, quantize):
            return
        source = operator.inputs[0]
        assert source is not None
        is_made = source.producer() is not None and not is_constant(source)
        is_read_once = len(source.uses()) == 1 and not source.is_graph_output()
        if not is_made or not is_read_once or producer_of(source, "DequantizeLinear"):
            return
        builder = NodeBuilder(f"{source.name}.between", operator)
        codes = builder.add("QuantizeLinear", source, *qparams)
        operator.replace_input_with(0, builder.add("DequantizeLinear", codes, *qparams))
        value = source


def _is_cut_apart(operator: ir.Node, quantize: ir.Node) -> bool:
    """Return whether an operator only cuts values off, and runs on its own.

    The DPU, whose codes are signed, runs ReLU with the convolution before it.
    """
    zero_point = quantize.inputs[2]
    assert zero_point is not None
    return operator.op_type in _CUTTING and zero_point.dtype not in _SIGNED


def _quantize_after(operator: ir.Node) -> None:
    """Quantize what an operator makes of dequantized values, with their scale."""
    dequantize = producer_of(operator.inputs[0], "DequantizeLinear")
    if dequantize is None or not all(is_constant(value) for value in dequantize.inputs[1:]):
        return
    if is_constant(dequantize.inputs[0]):
        return
    for value in operator.outputs:
        readers = value.consumers()
        is_quantized = all(reader.op_type == "QuantizeLinear" for reader in readers)
        if not is_quantized or value.is_graph_output():
            requantize(value, dequantize)
