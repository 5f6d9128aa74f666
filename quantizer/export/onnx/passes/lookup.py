"""Looks up rows in the codes of a quantized table, so that no call dequantizes the whole table.

ONNX Runtime keeps DequantizeLinear for its kernels and does not compute it ahead.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    is_constant,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.marks import Lowering

# The types of codes that ONNX Runtime's Gather takes.
_GATHERED_TYPES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)


def look_up_codes(model: ir.Model, lowering: Lowering) -> None:
    """Replace each Gather of rows of a dequantized table by one of its codes."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or not _is_table(node):
            continue
        for gather in node.outputs[0].consumers():
            replace_node(gather, _rows(node, gather))
        remove_node(node)


def _is_table(dequantize: ir.Node) -> bool:
    """Return whether codes are a constant table of which only rows are read."""
    codes = dequantize.inputs[0]
    table = dequantize.outputs[0]
    if codes is None or not is_constant(codes) or codes.dtype not in _GATHERED_TYPES:
        return False
    attributes = dequantize.attributes
    if "block_size" in attributes and attributes["axis"].as_int() not in (1, -1):
        # A block of scales spans several rows.
        return False
    if table.is_graph_output():
        return False
    return all(_is_lookup(reader, table) for reader in table.consumers())


def _is_lookup(node: ir.Node, table: ir.Value) -> bool:
    """Return whether a node picks rows of a table and does nothing else with it."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    return node.inputs[0] is table and node.inputs[1] is not table


def _rows(dequantize: ir.Node, gather: ir.Node) -> ir.Value:
    """Add nodes that pick codes, and scales if rows have their own, and dequantize them."""
    codes, scale, *zero_points = dequantize.inputs
    indices = gather.inputs[1]
    attributes = {name: attr.value for name, attr in dequantize.attributes.items()}
    builder = NodeBuilder(f"{gather.outputs[0].name}.rows", gather)
    picked = builder.add("Gather", codes, indices)
    assert scale is not None and scale.shape is not None
    rank = len(scale.shape)
    last = attributes | {"axis": -1}
    if rank != 2 and not (rank and attributes["axis"] == 0):
        return builder.add("DequantizeLinear", picked, scale, *zero_points, **last)
    row_scales = builder.add("Gather", scale, indices)
    if "block_size" in attributes:
        row_zeros = [builder.add("Gather", zero_point, indices) for zero_point in zero_points]
        return builder.add("DequantizeLinear", picked, row_scales, *row_zeros, **last)
    last_axis = builder.indices("axis", [-1])
    floats = builder.cast(picked, ir.DataType.FLOAT)
    for zero_point in zero_points:
        zero_array = array_of(zero_point)
        if zero_array is not None and zero_array.any():
            row_zero = builder.add("Gather", zero_point, indices)
            column = builder.add("Unsqueeze", row_zero, last_axis)
            distance = builder.cast(column, ir.DataType.FLOAT)
            floats = builder.add("Sub", floats, distance)
    return builder.add("Mul", floats, builder.add("Unsqueeze", row_scales, last_axis))
