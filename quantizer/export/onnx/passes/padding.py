"""Pads codes, for Pad and average pools, and the input channels of convolutions.

OpenVINO pads the codes with 0, without regard to the zero point. Padding with the zero point
gives the same values in all runtimes.

The kernels of ONNX Runtime on x86 that read codes and int8 weights directly take input channels
in fours. For other numbers of channels it first copies each window of the input. Channels of
zero weights change no sum.

Source: ONNX Runtime 1.31, onnxruntime/core/mlas/lib/convsym.cpp, MlasConvSymPackWSize.
"""

from collections.abc import Sequence

import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    attributes_of,
    is_quantized,
    producer_of,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.passes.moves import only_moves, origins
from quantizer.export.onnx.restated import missing_channels
from quantizer.export.onnx.tensors import EIGHT_BITS

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
    dequantize = _dequantize_of(source)
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
    dequantize = _dequantize_of(source)
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


def _dequantize_of(source: ir.Value) -> ir.Node | None:
    """Return the DequantizeLinear that a value comes from, if zero has another code than 0.

    None unless the codes have 8 bits.
    """
    *_, origin = origins(source)
    dequantize = producer_of(origin, "DequantizeLinear")
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
    weights = builder.add("DequantizeLinear", wide_codes, *factors, **attributes_of(of_weights))
    conv.replace_input_with(1, weights)
    for node in (of_x, of_weights):
        if not node.outputs[0].uses():
            remove_node(node)
