"""Looks up rows in the codes of a quantized table, so that no call dequantizes the whole table.
Computes codes that follow from constants alone, such as table rows at fixed positions.

ONNX Runtime keeps DequantizeLinear for its kernels and does not compute it ahead. It would
compute constant codes when it loads the file. OpenVINO fails on some.
"""

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from quantizer.export.onnx.builder import (
    NodeBuilder,
    add_initializer,
    array_of,
    attributes_of,
    inputs_of,
    is_constant,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.tensors import EIGHT_BITS

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
    attributes = attributes_of(dequantize)
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


def compute_constants(model: ir.Model, lowering: Lowering) -> None:
    """Replace such codes by initializers, and remove the nodes that made them."""
    computed: set[ir.Value] = set()
    codes: dict[ir.Value, None] = {}
    for node in model.graph:
        if node.op_type == "DequantizeLinear" and _has_8_bit_zero_point(node):
            value = node.inputs[0]
            if value in computed:
                codes[value] = None
        if all(value in computed or is_constant(value) for value in inputs_of(node)):
            computed.update(node.outputs)
    if not codes:
        return
    arrays = _compute(model, list(codes))
    for value, array in zip(codes, arrays, strict=True):
        producer = value.producer()
        name = value.name
        value.name = f"{name}.computed"
        constant = add_initializer(model.graph, ir.Tensor(array, name=name))
        value.replace_all_uses_with(constant)
        _remove_unread(producer)


def _has_8_bit_zero_point(node: ir.Node) -> bool:
    """Return whether the codes of a DequantizeLinear have a type that numpy has, too."""
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    return zero_point is not None and is_constant(zero_point) and zero_point.dtype in EIGHT_BITS


def _compute(model: ir.Model, values: Sequence[ir.Value]) -> list[Any]:
    """Return the arrays of values that follow from initializers."""
    nodes: list[ir.Node] = []
    initializers: dict[ir.Value, None] = {}
    needed = set(values)
    for node in reversed(model.graph):
        if needed.isdisjoint(node.outputs):
            continue
        nodes.append(node)
        for value in inputs_of(node):
            needed.add(value)
            if is_constant(value):
                initializers[value] = None
    tensors: list[onnx.TensorProto] = []
    for value in initializers:
        if value.const_value is not None:
            tensor = ir.to_proto(value.const_value)
            # The tensor's own name may be empty
            tensor.name = str(value.name)
            tensors.append(tensor)
    outputs = [onnx.helper.make_empty_tensor_value_info(str(value.name)) for value in values]
    protos = [ir.to_proto(node) for node in reversed(nodes)]
    graph = onnx.helper.make_graph(protos, "constants", [], outputs, tensors)
    opsets = [
        onnx.helper.make_opsetid(domain, version)
        for domain, version in model.opset_imports.items()
    ]
    part = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    content = part.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    arrays: list[Any] = session.run(None, {})
    return arrays


def _remove_unread(node: ir.Node | None) -> None:
    """Remove a node, and those before it, if nothing reads them.

    A node that two others read can be gone already: `x / norm(x)` reaches `x` twice.
    """
    if node is None or node.graph is None:
        return
    for value in node.outputs:
        if value.uses() or value.is_graph_output():
            return
    producers = dict.fromkeys(value.producer() for value in inputs_of(node))
    remove_node(node)
    for producer in producers:
        _remove_unread(producer)
