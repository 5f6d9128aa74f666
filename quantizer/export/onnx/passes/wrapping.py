"""Quantizes values between operators that only move or cut them.

Engines that run an operator in integers between DequantizeLinear and QuantizeLinear only want
these around each operator. With the same scale and zero point, no value changes: moves give
the codes that they take, and cutting off is monotone, as rounding is.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import NodeBuilder, is_constant, producer_of
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
    """Quantize what the operators before a quantization cut or move."""
    qparams = quantize.inputs[1:]
    if not all(is_constant(value) for value in qparams):
        return
    value = quantize.inputs[0]
    while value is not None:
        operator = _wrapped_before(value, quantize)
        if operator is None:
            return
        source = operator.inputs[0]
        assert source is not None
        builder = NodeBuilder(f"{source.name}.between", operator)
        codes = builder.add("QuantizeLinear", source, *qparams)
        dequantized = builder.add("DequantizeLinear", codes, *qparams)
        operator.replace_input_with(0, dequantized)
        value = source


def _wrapped_before(value: ir.Value, quantize: ir.Node) -> ir.Node | None:
    """Return the operator that makes a value, if its input can be quantized as `quantize` does.

    Nothing else may read the two, and the input must be a float that an operator has made.
    """
    operator = value.producer()
    if operator is None or not _is_read_once(value):
        return None
    if not only_moves(operator) and not _is_cut_apart(operator, quantize):
        return None
    source = operator.inputs[0]
    if source is None or not _is_read_once(source):
        return None
    maker = source.producer()
    if maker is None or maker.op_type == "DequantizeLinear":
        return None
    return operator


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _is_cut_apart(operator: ir.Node, quantize: ir.Node) -> bool:
    """Return whether an operator only cuts values off, and runs on its own.

    The DPU, whose codes are signed, runs ReLU with the convolution before it.
    """
    zero_point = quantize.inputs[2]
    assert zero_point is not None
    return operator.op_type in _CUTTING and zero_point.dtype not in _SIGNED


def _quantize_after(operator: ir.Node) -> None:
    """Quantize what an operator makes of dequantized values, with their scale."""
    source = operator.inputs[0]
    dequantize = producer_of(source, "DequantizeLinear")
    if dequantize is None or is_constant(dequantize.inputs[0]):
        return
    if not all(is_constant(value) for value in dequantize.inputs[1:]):
        return
    for value in operator.outputs:
        readers = {reader.op_type for reader in value.consumers()}
        if readers != {"QuantizeLinear"} or value.is_graph_output():
            requantize(value, dequantize)
