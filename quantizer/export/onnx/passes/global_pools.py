"""Writes means over all positions of an image as GlobalAveragePool.

torch.onnx writes an average pool with one output as ReduceMean, which ONNX Runtime computes in
floats. Between quantized values, GlobalAveragePool runs as QLinearGlobalAveragePool.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    is_quantized,
    producer_of,
    replace_node,
)
from quantizer.export.onnx.marks import Lowering

# The first two axes are samples and channels.
_FIRST_POSITION = 2


def pool_globally(model: ir.Model, lowering: Lowering) -> None:
    """Replace each ReduceMean over all positions whose input and output are quantized."""
    for node in list(model.graph):
        if node.op_type != "ReduceMean" or not _averages_positions(node):
            continue
        x = node.inputs[0]
        if x is None or producer_of(x, "DequantizeLinear") is None:
            continue
        if not is_quantized(node.outputs[0]):
            continue
        builder = NodeBuilder(str(node.name), node)
        mean = builder.add("GlobalAveragePool", x, node_name=str(node.name))
        replace_node(node, mean)


def _averages_positions(node: ir.Node) -> bool:
    """Return whether a ReduceMean keeps samples and channels, and the number of axes."""
    x = node.inputs[0]
    axes = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None:
        return False
    if node.attributes.get_int("keepdims", 1) != 1:
        return False
    rank = len(x.shape)
    positions = list(range(_FIRST_POSITION, rank))
    reduced = sorted(int(axis) % rank for axis in axes)
    return rank > _FIRST_POSITION and reduced == positions
