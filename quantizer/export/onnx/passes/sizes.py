"""Writes sizes that a file reads while it runs in a form that OpenVINO reads in one place only.

OpenVINO takes the size of a batch from the output of a convolution before its bias. If the sum
with the bias is quantized, it then adds another bias. A size that is computed as a sum can only
be taken from that sum.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import NodeBuilder, replace_node
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.passes.moves import PASSED_OPERATORS


def write_sizes_as_sums(model: ir.Model, lowering: Lowering) -> None:
    """Write single sizes as sums if the sum of a convolution and its bias is quantized."""
    if not any(_quantizes_sum(node) for node in model.graph):
        return
    for node in list(model.graph):
        axis = _single_axis(node) if node.op_type == "Shape" else None
        if axis is not None:
            replace_node(node, _as_sum(node, axis))


def _quantizes_sum(node: ir.Node) -> bool:
    """Return whether the output of a convolution with a bias is quantized without an operator
    between.
    """
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) != 3:
        return False
    waiting = list(node.outputs)
    while waiting:
        for reader in waiting.pop().consumers():
            if reader.op_type == "QuantizeLinear":
                return True
            if reader.op_type in PASSED_OPERATORS:
                waiting += reader.outputs
    return False


def _single_axis(node: ir.Node) -> int | None:
    """Return the axis whose size a Shape reads; None if it reads several."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    rank = len(source.shape)
    start = node.attributes.get_int("start", 0)
    axes = range(rank)[start : node.attributes.get_int("end", rank)]
    return axes[0] if len(axes) == 1 else None


def _as_sum(node: ir.Node, axis: int) -> ir.Value:
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    builder = NodeBuilder(f"{node.outputs[0].name}.summed", node)
    mask = [0] * len(source.shape)
    mask[axis] = 1
    sizes = builder.add("Shape", source)
    single = builder.add("Mul", sizes, builder.indices("picked", mask))
    along = builder.indices("axis", [0])
    return builder.add("ReduceSum", single, along, keepdims=1)
