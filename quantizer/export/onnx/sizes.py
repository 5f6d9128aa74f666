"""Sizes that a file reads off a tensor while it runs, in a form that keeps OpenVINO from
reading them elsewhere.

OpenVINO takes the size of a batch from what a convolution makes before its bias, if any. Where
the sum with the bias is quantized, it then adds another bias. A size that is a sum has no other
place that it could be taken from.
"""

from collections.abc import Mapping, Sequence

import torch
from onnx import NodeProto, TensorProto, helper

from quantizer.export.onnx.linear import readers_of
from quantizer.export.onnx.nodes import Emission
from quantizer.export.onnx.padding import Sizes

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_PASSED = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool")
"""Operators that leave the quantization at the sum: OpenVINO moves it past them."""


def summed_sizes(
    nodes: list[NodeProto], sizes: Sizes
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes with single sizes as sums, and the initializers that these read.

    All stay as they are where no sum of a convolution and its bias is quantized.
    """
    if not _quantizes_sums(nodes):
        return nodes, []
    rewritten: list[NodeProto] = []
    initializers: list[TensorProto] = []
    for node in nodes:
        emission = _as_sum(node, sizes) if node.op_type == "Shape" else None
        if emission is None:
            rewritten.append(node)
            continue
        rewritten += emission.nodes
        initializers += emission.initializers
    return rewritten, initializers


def _quantizes_sums(nodes: Sequence[NodeProto]) -> bool:
    """Return whether what a convolution with a bias makes is quantized, and nothing is computed
    of it before.
    """
    readers = readers_of(nodes)
    for node in nodes:
        if (
            node.op_type in _CONVOLUTIONS
            and len(node.input) == 3
            and _is_quantized(node, readers)
        ):
            return True
    return False


def _is_quantized(node: NodeProto, readers: Mapping[str, Sequence[NodeProto]]) -> bool:
    """Return whether a node's output is quantized, as it is or moved."""
    waiting = list(node.output)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader.op_type == "QuantizeLinear":
                return True
            if reader.op_type in _PASSED:
                waiting += reader.output
    return False


def _as_sum(shape: NodeProto, sizes: Sizes) -> Emission | None:
    """Return the nodes in place of one that reads a single size; None for one that reads
    several.
    """
    rank = len(sizes.get(shape.input[0], ()))
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in shape.attribute
    }
    axes = range(rank)[slice(attributes.get("start", 0), attributes.get("end", rank))]
    if len(axes) != 1:
        return None
    emission = Emission(f"{shape.output[0]}.summed")
    picked = torch.zeros(rank, dtype=torch.int64)
    picked[axes[0]] = 1
    every = emission.add("Shape", shape.input[0])
    single = emission.add("Mul", every, emission.integers("picked", picked))
    along = emission.integers("axis", torch.tensor([0]))
    emission.add("ReduceSum", single, along, output=shape.output[0], keepdims=1)
    return emission
