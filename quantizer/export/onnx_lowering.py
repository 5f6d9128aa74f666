"""Puts quantizations where torch.onnx has translated marks: nodes for activations, codes for weights. Names the layers
that multiply.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.export.onnx_linear import straighten
from quantizer.export.onnx_nodes import UNBOUNDED, Emission, clips_codes, quantize_activation, quantize_weights
from quantizer.export.onnx_tensors import INT32, float_tensor
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

Wanted = Sequence[tuple[Key, QuantizedTensor]]
"""What is quantized; a mark stands for one by its index."""
DOMAIN = "quantizer"
"""Of the marks."""
_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""Operators whose weights stay float in between, and the axis of the weight that their outputs lie along."""


def lower(model: ModelProto, network: Network, wanted: Wanted, opset: int) -> None:
    """Put the quantizations in where the marks are: nodes, and codes for weights; and name what multiplies."""
    straight = straighten(model, lambda node: node.domain == DOMAIN and is_parameter(wanted[_index(node)][0][1]))
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    readers = Counter(name for node in model.graph.node for name in node.input)
    readers.update(value.name for value in model.graph.output)
    layers = {f"network.{module}.weight": layer for layer, module in network.module_names.items()}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            nodes.append(node)
            continue
        (source,), (result,), ((layer, role), tensor) = node.input, node.output, wanted[_index(node)]
        name = f"{layer}.{role}"
        if is_parameter(role):
            layers[result] = layer
            values = network.layers[layer].get_parameter(parameter_name(role)).detach()
            transposed = result in straight
            emission = quantize_weights(name, tensor, values, result, opset, transposed=transposed)
            emission = emission or _as_floats(result, values.T if transposed else values)
        else:
            layers[source] = layer
            bounds, cut = UNBOUNDED, makers.get(source)
            if cut is not None and readers[source] == 1 and clips_codes(tensor.spec, opset):
                bounds = _bounds(cut, tensors)
            if cut is not None and bounds != UNBOUNDED:
                nodes.remove(cut)
                source = cut.input[0]
            emission = quantize_activation(name, tensor, source, result, opset, bounds)
        model.graph.initializer.extend(emission.initializers)
        nodes += emission.nodes
    for node in nodes:
        if node.op_type in MULTIPLYING:
            node.name = _layer(node, makers, layers) or node.name
    _keep_float_weights(model, nodes)
    _replace(model, nodes)


MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _layer(node: NodeProto, makers: Mapping[str, NodeProto], layers: Mapping[str, str]) -> str | None:
    """The layer whose weight a node multiplies by; of a product of activations, the layer that quantizes it."""
    weight = node.input[1]
    while weight not in layers and weight in makers and makers[weight].op_type == "Transpose":
        weight = makers[weight].input[0]
    is_weight = weight in layers and (weight not in makers or makers[weight].domain == DOMAIN)
    return layers[weight] if is_weight else layers.get(node.output[0])


def _replace(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Other nodes, and no initializers but those that they read."""
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    for index in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[index].name not in read:
            del model.graph.initializer[index]


def _bounds(node: NodeProto, tensors: Mapping[str, TensorProto]) -> tuple[float, float]:
    """Between what an activation function that only cuts off cuts its input."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type != "Clip" or any(name and name not in tensors for name in node.input[1:]):
        return UNBOUNDED
    ends = [float(numpy_helper.to_array(tensors[name])) if name else None for name in node.input[1:]]
    low, high = (*ends, None, None)[:2]
    return -math.inf if low is None else low, math.inf if high is None else high


def _index(mark: NodeProto) -> int:
    """Which of the quantizations a mark stands for."""
    return int(mark.attribute[0].i)


def _as_floats(name: str, values: Tensor) -> Emission:
    """A float initializer."""
    return Emission(name, initializers=[float_tensor(name, values)])


def _keep_float_weights(model: ModelProto, nodes: list[NodeProto]) -> None:
    """Make the biases of layers with float weights something that the optimizer cannot look into.

    Between quantized values it would else quantize such weights itself, to 8 bits per tensor. A bias that is computed
    keeps it from that, and DequantizeLinear is never computed ahead.
    """
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    quantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    for node in list(nodes):
        if node.op_type in _CHANNELS and node.input[0] in quantized and node.input[1] in shapes:
            emission = Emission(f"{node.name}.bias")
            zeros = emission.codes("zeros", torch.zeros(_channels(node, shapes[node.input[1]])), INT32)
            bias = emission.add("DequantizeLinear", zeros, emission.constant("one", 1.0))
            if len(node.input) == 3:
                node.input[2] = emission.add("Add", node.input[2], bias)
            else:
                node.input.append(bias)
            model.graph.initializer.extend(emission.initializers)
            at = nodes.index(node)
            nodes[at:at] = emission.nodes


def _channels(node: NodeProto, shape: tuple[int, ...]) -> int:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("transB"):
        return shape[0]
    return shape[_CHANNELS[node.op_type]] * (attributes.get("group", 1) if node.op_type == "ConvTranspose" else 1)
