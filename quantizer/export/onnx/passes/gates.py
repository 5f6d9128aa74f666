"""For `--onnx_profile fast`: quantizes the gates of hard-swish and SiLU to 8 bits.

x * gate(x) then runs as QLinearMul, and a sigmoid as a table, instead of in floats.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import NodeBuilder, producer_of, replace_node
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.tensors import UINT8

# Gates are between 0 and 1.
_GATE_STEP = 1 / 255
_GATES = ("Sigmoid", "HardSigmoid")


def quantize_gates(
    model: ir.Model,
    lowering: Lowering,
) -> None:
    """Quantize each gate whose product with its own quantized input is quantized."""
    if not lowering.conventions.is_packed:
        return
    for node in list(model.graph):
        if node.op_type not in ("HardSwish", "Mul") or not _is_quantized(node.outputs[0]):
            continue
        x = node.inputs[0]
        if producer_of(x, "DequantizeLinear") is None:
            continue
        builder = NodeBuilder(str(node.outputs[0].name), node)
        gate = _gate(builder, node)
        if gate is not None:
            scale = builder.constant("gate.scale", _GATE_STEP)
            zero = builder.constant("gate.zero_point", 0, UINT8.data_type)
            codes = builder.add("QuantizeLinear", gate, scale, zero)
            gate = builder.add("DequantizeLinear", codes, scale, zero)
            replace_node(node, builder.add("Mul", x, gate))


def _is_quantized(value: ir.Value) -> bool:
    for reader in value.consumers():
        if reader.op_type == "QuantizeLinear" and reader.inputs[0] is value:
            return True
    return False


def _gate(
    builder: NodeBuilder,
    node: ir.Node,
) -> ir.Value | None:
    """Return the gate of a HardSwish, which is its own operator then, or of a Mul."""
    x = node.inputs[0]
    if node.op_type == "HardSwish":
        return builder.add(
            "HardSigmoid",
            x,
            alpha=1 / 6,
            beta=0.5,
        )
    gate = node.inputs[1]
    operator = None if gate is None else gate.producer()
    if operator is None or operator.op_type not in _GATES or operator.inputs[0] is not x:
        return None
    return gate
