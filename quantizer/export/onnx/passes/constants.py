"""Computes codes that follow from constants alone, such as table rows at fixed positions.

ONNX Runtime would compute them when it loads the file. OpenVINO fails on some.
"""

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime

from quantizer.export.onnx.builder import add_initializer, inputs_of, is_constant, remove_node
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.tensors import EIGHT_BITS


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
        for reader, index in list(value.uses()):
            reader.replace_input_with(index, constant)
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
