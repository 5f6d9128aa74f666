"""Computes quantized values that follow from constants alone (rows of a table at fixed
positions) for the file.

ONNX Runtime would compute them when it loads the file; OpenVINO fails on some.
"""

import onnxruntime
from onnx import ModelProto, NodeProto, helper, numpy_helper

from quantizer.export.onnx.nodes import CLIPPED


def folded(model: ModelProto, nodes: list[NodeProto]) -> list[NodeProto]:
    """Return the nodes without those that made such codes, which become initializers of the
    model.
    """
    constant = {tensor.name for tensor in model.graph.initializer}
    stored = set(constant)
    makers: dict[str, NodeProto] = {}
    for node in nodes:
        if all(name in constant or not name for name in node.input):
            constant.update(node.output)
            makers |= dict.fromkeys(node.output, node)
    narrow = {tensor.name for tensor in model.graph.initializer if tensor.data_type in CLIPPED}
    codes: dict[str, None] = {}
    for node in nodes:
        if (
            node.op_type != "DequantizeLinear"
            or node.input[0] not in constant
            or node.input[0] in stored
        ):
            continue
        if len(node.input) > 2 and node.input[2] in narrow:  # numpy has their type
            codes[node.input[0]] = None
    if not codes:
        return nodes
    _compute(model, [node for node in nodes if node.output[0] in makers], list(codes))
    outputs = {value.name for value in model.graph.output}
    return _read([node for node in nodes if codes.keys().isdisjoint(node.output)], outputs)


def _compute(model: ModelProto, nodes: list[NodeProto], names: list[str]) -> None:
    """Add the values of these names as initializers; `nodes` make them of other
    initializers.
    """
    needed = _read(nodes, set(names))
    read = {name for node in needed for name in node.input}
    initializers = [tensor for tensor in model.graph.initializer if tensor.name in read]
    values = [helper.make_empty_tensor_value_info(name) for name in names]
    graph = helper.make_graph(needed, "constants", [], values, initializers)
    part = helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    )
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for name, codes in zip(names, session.run(None, {}), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(codes, name))


def _read(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Return the nodes that make these outputs, or something that others read for them."""
    wanted = set(outputs)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]
