"""Computes what an ONNX file and its encodings mean, with operators on floats."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper

from quantizer.export.encodings.document import TensorEncoding, read_document
from quantizer.export.encodings.rules import channel_axes

_READ = ".quantized"
_MADE = ".float"


def evaluated_model(model: ModelProto, text: str) -> ModelProto:
    """Return the model with each tensor quantized as its encoding says.

    Codes are those of aimet-onnx: x / scale is rounded to the nearest integer, ties up.

    Args:
        model: the file's, which is not changed.
        text: of the file of encodings.
    """
    evaluated = ModelProto()
    evaluated.CopyFrom(model)
    graph = evaluated.graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    encodings = read_document(json.loads(text), shapes, channel_axes(model))
    by_name = {encoding.name: encoding for encoding in encodings}
    for tensor in graph.initializer:
        if tensor.name in by_name:
            values = numpy_helper.to_array(tensor)
            rounded = _quantized(values, by_name[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    inputs = {value.name for value in graph.input}
    nodes: list[NodeProto] = []
    for name in inputs:
        if name in by_name:
            _rename_readers(graph, name)
            nodes += _nodes(graph, by_name[name], name, name + _READ)
    for node in graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in by_name:
                node.output[index] = name + _MADE
                nodes += _nodes(graph, by_name[name], name + _MADE, name)
    copies: list[NodeProto] = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del graph.node[:]
    graph.node.extend(copies)
    return evaluated


def _rename_readers(graph: GraphProto, name: str) -> None:
    """Make all nodes read the quantized value of an input."""
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = name + _READ


def _quantized(values: NDArray[np.float32], encoding: TensorEncoding) -> NDArray[np.float32]:
    """Return the values of a parameter's codes."""
    scale = _spread(encoding.scale.astype(np.float32), encoding, values.shape)
    zero_point = _spread(encoding.zero_point, encoding, values.shape)
    codes = np.rint(values / scale) + zero_point
    codes = np.clip(codes, encoding.lowest, encoding.highest)
    return np.asarray((codes - zero_point).astype(np.float32) * scale, np.float32)


def _spread(
    values: NDArray[Any], encoding: TensorEncoding, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return scales or zero points in a shape that broadcasts to the tensor's."""
    axis = encoding.axis
    if axis is None:
        return values
    if encoding.block_size is not None:
        return np.repeat(values, encoding.block_size, axis)
    broadcast = [1] * len(shape)
    broadcast[axis] = -1
    return values.reshape(broadcast)


def _nodes(
    graph: GraphProto, encoding: TensorEncoding, source: str, result: str
) -> list[NodeProto]:
    """Return nodes that quantize an activation, and add their constants to the graph."""
    scale = float(encoding.scale)
    zero_point = int(encoding.zero_point)
    constants = {
        "scale": scale,
        "two": 2.0,
        "half": 0.5,
        "low": float(encoding.lowest - zero_point),
        "high": float(encoding.highest - zero_point),
    }
    names: dict[str, str] = {}
    for word, constant in constants.items():
        names[word] = f"{encoding.name}.{word}"
        array = np.array(constant, np.float32)
        graph.initializer.append(numpy_helper.from_array(array, names[word]))
    # Floor(x + 0.5) would round the float below 0.5 up.
    steps: Iterable[tuple[str, Sequence[str]]] = (
        ("Div", ["scale"]),
        ("Mul", ["two"]),
        ("Floor", []),
        ("Mul", ["half"]),
        ("Ceil", []),
        ("Clip", ["low", "high"]),
        ("Mul", ["scale"]),
    )
    nodes: list[NodeProto] = []
    value = source
    for number, (op_type, words) in enumerate(steps):
        operands = [names[word] for word in words]
        output = f"{encoding.name}.step_{number}"
        nodes.append(onnx.helper.make_node(op_type, [value, *operands], [output], output))
        value = output
    nodes[-1].output[0] = result
    return nodes
