"""Inserts QuantizeLinear and DequantizeLinear after data movement, and pads codes.

They are inserted where ONNX Runtime cannot move a DequantizeLinear past an operator.
So the following MatMul or Conv still runs in integers, for example for the heads of attention,
which are slices of one tensor. Requantizing with the same scale gives the same codes.

Engines that run an operator in integers between DequantizeLinear and QuantizeLinear only want
these around each operator that moves values or cuts them off, too. With the same scale and zero
point, no value changes: cutting off is monotone, as rounding is.

Codes are padded for Pad and average pools. OpenVINO pads the codes with 0, without regard to
the zero point. Padding with the zero point gives the same values in all runtimes.

The kernels of ONNX Runtime on x86 that read codes and int8 weights directly take input channels
in fours. For other numbers of channels it first copies each window of the input. Channels of
zero weights change no sum.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib/convsym.cpp, MlasConvSymPackWSize.
"""

from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    attributes_of,
    is_constant,
    is_quantized,
    nodes_of,
    operand,
    producer_of,
    redirect,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.lowering import EIGHT_BITS, MULTIPLYING, Lowering
from quantizer.export.onnx.restated import missing_channels

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
# Operators on two values of one shape for which ONNX Runtime has kernels of integers.
_ELEMENTWISE = ("Add", "Mul")
_SIGNED = (ir.DataType.INT8, ir.DataType.INT16)


def requantize_moves(model: ir.Model, lowering: Lowering) -> None:
    """Quantize moved values again before products, and before sums between codes."""
    dequantized_by: dict[ir.Value, ir.Node] = {}
    for node in nodes_of(model.graph, *MULTIPLYING, *_ELEMENTWISE):
        if node.op_type in _ELEMENTWISE and not _is_between_codes(node):
            continue
        for factor in node.inputs[:2]:
            if factor is not None:
                dequantized_by |= _stopped_values(factor)
    for node in list(model.graph):
        for value in node.outputs:
            if value in dequantized_by:
                requantize(value, dequantized_by[value])


def _is_between_codes(node: ir.Node) -> bool:
    """Return whether the inputs of a node are dequantized, perhaps before data movement, and
    its output is quantized.
    """
    for value in node.inputs:
        if dequantize_of(value) is None:
            return False
    return is_quantized(node.outputs[0])


def _stopped_values(factor: ir.Value) -> dict[ir.Value, ir.Node]:
    """Return the moved values before a product that need a quantization again.

    Each is given with the DequantizeLinear that it comes from.
    """
    *moved, origin = origins(factor)
    dequantize = producer_of(origin, "DequantizeLinear")
    if dequantize is None or is_constant(dequantize.inputs[0]):
        return {}
    if not is_constant(dequantize.inputs[1]):
        return {}
    movers = {value: value.producer() for value in moved}
    return {
        value: dequantize
        for value, mover in movers.items()
        if mover is not None and mover.op_type in (*_STOPPING, _JOIN)
    }


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
        source = operand(node)
        yield source
        node = source.producer()


def dequantize_of(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear that a value comes from, perhaps before data movement."""
    if value is None:
        return None
    *_, origin = origins(value)
    return producer_of(origin, "DequantizeLinear")


def _joins_one_scale(node: ir.Node) -> bool:
    """Return whether a node joins values that all have the same scale and zero point."""
    if node.op_type != _JOIN:
        return False
    qparams: set[tuple[ir.Value | None, ...]] = set()
    for value in node.inputs:
        dequantize = dequantize_of(value)
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
    for node in nodes_of(model.graph, "Relu"):
        _quantize_after(node)


def wrap_operators(model: ir.Model, lowering: Lowering) -> None:
    """Quantize the inputs and the outputs of moves, and the inputs of what cuts off."""
    if not lowering.conventions.wraps_operators:
        return
    for node in nodes_of(model.graph, "QuantizeLinear"):
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
        source = operand(operator)
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
    zero_point = operand(quantize, 2)
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


_PADDING_ATTRIBUTES = ("pads", "count_include_pad")


def pad_codes(model: ir.Model, lowering: Lowering) -> None:
    """Pad codes instead of dequantized values."""
    for node in list(model.graph):
        padded: ir.Value | None = None
        if node.op_type == "AveragePool":
            padded = _padded_pool(node)
        elif node.op_type == "Pad":
            padded = _padded(node)
        if padded is not None:
            replace_node(node, padded)


def _padded_pool(pool: ir.Node) -> ir.Value | None:
    """Return the value of a pool behind a Pad; None for a pool that is read right as it is."""
    source = pool.inputs[0]
    pads = list(pool.attributes.get_ints("pads", ()))
    if source is None or not any(pads) or not pool.attributes.get_int("count_include_pad", 0):
        return None
    dequantize = _shifting_dequantize(source)
    if dequantize is None:
        return None
    if pool.attributes.get_int("ceil_mode", 0):
        size = _spatial_size(source)
        if size is None:
            # It decides which windows there are.
            return None
        kernel = pool.attributes["kernel_shape"].as_ints()
        pads = _pads_of_windows(size, pads, kernel, pool.attributes["strides"].as_ints())
    half = len(pads) // 2
    builder = NodeBuilder(f"{pool.outputs[0].name}.padded", pool)
    amounts = builder.indices("amounts", [0, 0, *pads[:half], 0, 0, *pads[half:]])
    values = _add_padding(builder, source, dequantize, [amounts])
    attributes = attributes_of(pool)
    for name in _PADDING_ATTRIBUTES:
        del attributes[name]
    return builder.add("AveragePool", values, node_name=pool.name, **attributes)


def _padded(pad: ir.Node) -> ir.Value | None:
    """Return the value of a Pad of codes; None if a Pad does not add zeros to codes."""
    source = pad.inputs[0]
    is_constant_mode = pad.attributes.get_string("mode", "constant") == "constant"
    if source is None or not is_constant_mode or not only_moves(pad):
        return None
    dequantize = _shifting_dequantize(source)
    if dequantize is None:
        return None
    builder = NodeBuilder(f"{pad.outputs[0].name}.padded", pad)
    return _add_padding(builder, source, dequantize, [pad.inputs[1], *pad.inputs[3:]])


def _add_padding(
    builder: NodeBuilder,
    source: ir.Value,
    dequantize: ir.Node,
    amounts: Sequence[ir.Value | None],
) -> ir.Value:
    """Add nodes that pad the codes of a value with its zero point.

    Args:
        dequantize: what the value comes from.
        amounts: the Pad's inputs on how much and, if not along all axes, along which.
    """
    codes, scale, zero_point = dequantize.inputs
    if dequantize.outputs[0] is not source:
        codes = builder.add("QuantizeLinear", source, scale, zero_point)
    how_much, *axes = amounts
    padded = builder.add("Pad", codes, how_much, zero_point, *axes)
    return builder.add("DequantizeLinear", padded, scale, zero_point)


def _shifting_dequantize(source: ir.Value) -> ir.Node | None:
    """Return the DequantizeLinear that a value comes from, if zero has another code than 0.

    None unless the codes have 8 bits.
    """
    dequantize = dequantize_of(source)
    if dequantize is None or len(dequantize.inputs) < 3:
        return None
    zero_point = dequantize.inputs[2]
    array = array_of(zero_point)
    if zero_point is None or array is None or zero_point.dtype not in EIGHT_BITS:
        return None
    return dequantize if array.any() else None


def _spatial_size(value: ir.Value) -> list[int] | None:
    """Return the sizes of a value behind batch and channels; None if one is open."""
    if value.shape is None or len(value.shape) < 3:
        return None
    sizes: list[int] = []
    for size in value.shape[2:]:
        if not isinstance(size, int):
            return None
        sizes.append(size)
    return sizes


def _pads_of_windows(
    size: Sequence[int], pads: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> list[int]:
    """Return the padding without positions at the end that would make another window.

    A pool that rounds the number of windows up leaves out one that begins in the padding after
    the values. If the padding is part of the values, it cannot see this.

    >>> _pads_of_windows([7], [1, 1], [2], [2])  # windows at 0, 2, 4, 6 and not at 8
    [1, 0]
    """
    half = len(pads) // 2
    ends: list[int] = []
    for axis in range(half):
        begin = pads[axis]
        end = pads[half + axis]
        last_start = size[axis] + begin + end - kernel[axis]
        windows = last_start // strides[axis] + 1
        if windows * strides[axis] >= size[axis] + begin:
            end -= last_start % strides[axis]
        ends.append(end)
    return [*pads[:half], *ends]


def pad_channels(model: ir.Model, lowering: Lowering) -> None:
    """Pad the codes and int8 weights of convolutions with few input channels."""
    for node in nodes_of(model.graph, "Conv"):
        if not is_quantized(node.outputs[0]):
            continue
        x, weights = node.inputs[:2]
        of_x = producer_of(x, "DequantizeLinear")
        of_weights = producer_of(weights, "DequantizeLinear")
        if of_x is not None and of_weights is not None:
            _pad_operands(node, of_x, of_weights)


def _pad_operands(conv: ir.Node, of_x: ir.Node, of_weights: ir.Node) -> None:
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
    missing = missing_channels(codes.shape, conv.attributes.get_int("group", 1))
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
    weights = builder.add("DequantizeLinear", wide_codes, *factors, **attributes_of(of_weights))
    conv.replace_input_with(1, weights)
    for node in (of_x, of_weights):
        if not node.outputs[0].uses():
            remove_node(node)
