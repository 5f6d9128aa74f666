"""Inserts QuantizeLinear and DequantizeLinear after data movement.

It does so where ONNX Runtime cannot move a DequantizeLinear past an operator.
So the following MatMul or Conv still runs in integers, for example for the heads of attention,
which are slices of one tensor. Requantizing with the same scale gives the same codes.

Engines that run an operator in integers between DequantizeLinear and QuantizeLinear only want
these around each operator that moves values or cuts them off, too. With the same scale and zero
point, no value changes: cutting off is monotone, as rounding is.
"""

from collections.abc import Iterator

import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    is_constant,
    producer_of,
    redirect,
)
from quantizer.export.onnx.marks import MULTIPLYING, Lowering

PASSED_OPERATORS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool")
"""Operators that ONNX Runtime and OpenVINO move a quantization past."""
# They only move or pick values, too, except for some forms of Pad and Resize.
_STOPPING = (
    "Split",
    "Slice",
    "Gather",
    "GatherElements",
    "Expand",
    "Tile",
    "DepthToSpace",
    "SpaceToDepth",
    "Pad",
    "Resize",
    "ReduceMax",
    "ReduceMin",
    "GlobalMaxPool",
)
MOVE_OPERATORS = (*PASSED_OPERATORS, *_STOPPING)
# It moves values if they all have one scale.
_JOIN = "Concat"
_CUTTING = ("Relu", "Clip")
_SIGNED = (ir.DataType.INT8, ir.DataType.INT16)


def requantize_moves(model: ir.Model, lowering: Lowering) -> None:
    """Quantize moved values again before products."""
    dequantized_by: dict[ir.Value, ir.Node] = {}
    for node in model.graph:
        operands = node.inputs[:2] if node.op_type in MULTIPLYING else ()
        for operand in operands:
            if operand is not None:
                dequantized_by |= _stopped_values(operand)
    for node in list(model.graph):
        for value in node.outputs:
            if value in dequantized_by:
                requantize(value, dequantized_by[value])


def _stopped_values(operand: ir.Value) -> dict[ir.Value, ir.Node]:
    """Return the moved values before a product that need a quantization again.

    Each is given with the DequantizeLinear that it comes from.
    """
    *moved, origin = origins(operand)
    dequantize = producer_of(origin, "DequantizeLinear")
    if dequantize is None or is_constant(dequantize.inputs[0]):
        return {}
    if not is_constant(dequantize.inputs[1]):
        return {}
    stopped: dict[ir.Value, ir.Node] = {}
    for value in moved:
        mover = value.producer()
        if mover is not None and (mover.op_type in _STOPPING or mover.op_type == _JOIN):
            stopped[value] = dequantize
    return stopped


def requantize(value: ir.Value, dequantize: ir.Node) -> None:
    """Quantize a moved value again, with the scale of the DequantizeLinear it comes from."""
    mover = value.producer()
    assert mover is not None
    qparams = dequantize.inputs[1:]
    builder = NodeBuilder(f"{value.name}.again", mover, after=True)
    codes = builder.add("QuantizeLinear", value, *qparams)
    redirect(value, builder.add("DequantizeLinear", codes, *qparams))
    quantize = codes.producer()
    assert quantize is not None
    quantize.replace_input_with(0, value)


def origins(value: ir.Value) -> Iterator[ir.Value]:
    """Yield a value, and the values that it was before data movement."""
    yield value
    node = value.producer()
    while node is not None and (only_moves(node) or _joins_one_scale(node)):
        source = node.inputs[0]
        assert source is not None
        yield source
        node = source.producer()


def _joins_one_scale(node: ir.Node) -> bool:
    """Return whether a node joins values that all have the same scale and zero point."""
    if node.op_type != _JOIN:
        return False
    qparams: set[tuple[ir.Value | None, ...]] = set()
    for value in node.inputs:
        assert value is not None
        *_, origin = origins(value)
        dequantize = producer_of(origin, "DequantizeLinear")
        if dequantize is None:
            return False
        qparams.add(tuple(dequantize.inputs[1:]))
    return len(qparams) == 1


def only_moves(node: ir.Node) -> bool:
    """Return whether a node's output has only values of its first input, and zero."""
    if node.op_type == "Resize":
        return node.attributes.get_string("mode", "nearest") == "nearest"
    if node.op_type != "Pad":
        return node.op_type in MOVE_OPERATORS
    if node.attributes.get_string("mode", "constant") != "constant" or len(node.inputs) < 3:
        return True
    filling = array_of(node.inputs[2])
    return filling is not None and not filling.any()


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
        operator.replace_input_with(0, builder.requantized(source, *qparams))
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
