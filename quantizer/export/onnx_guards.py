"""What ONNX Runtime's optimizer would change in a model is written so that it cannot. Changes no value."""

from __future__ import annotations

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper

from quantizer.export.onnx_nodes import Emission
from quantizer.export.onnx_tensors import INT32


def keep_float_weights(model: ModelProto) -> None:
    """Make the biases of layers with float weights something that the optimizer cannot look into.

    Between quantized values it would else quantize such weights itself, to 8 bits per tensor. A bias that is computed
    keeps it from that, and DequantizeLinear is never computed ahead.
    """
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    quantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type in _CHANNELS and node.input[0] in quantized and node.input[1] in shapes:
            emission = Emission(f"{node.name}.bias")
            zeros = emission.codes("zeros", torch.zeros(_channels(node, shapes[node.input[1]])), INT32)
            bias = emission.add("DequantizeLinear", zeros, emission.constant("one", 1.0))
            if len(node.input) == 3:
                node.input[2] = emission.add("Add", node.input[2], bias)
            else:
                node.input.append(bias)
            model.graph.initializer.extend(emission.initializers)
            nodes += emission.nodes
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""The operators in question, and the axis of the weight that their outputs lie along."""


def _channels(node: NodeProto, shape: tuple[int, ...]) -> int:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("transB"):
        return shape[0]
    return shape[_CHANNELS[node.op_type]] * (attributes.get("group", 1) if node.op_type == "ConvTranspose" else 1)
