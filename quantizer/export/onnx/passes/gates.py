"""For `--onnx_profile fast` and `tuned`: quantizes the gates of hard-swish and SiLU to 8 bits.

x * gate(x) then runs as QLinearMul, and a sigmoid as a table, instead of in floats. A
hard-sigmoid, clamp(a x + b, 0, 1), becomes an Add: x + b / a with codes from 0 to 1 / a. Their
ends clamp it. Read with a scale a times as large, the codes are those of the gate. So it runs
as QLinearAdd.
"""

import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    is_quantized,
    producer_of,
    replace_node,
)
from quantizer.export.onnx.marks import Lowering
from quantizer.export.onnx.tensors import UINT8

# Gates are between 0 and 1.
_GATE_STEP = 1 / 255


def quantize_gates(
    model: ir.Model,
    lowering: Lowering,
) -> None:
    """Quantize each gate whose product with its own quantized input is quantized."""
    if not lowering.conventions.quantizes_gates:
        return
    for node in list(model.graph):
        if node.op_type not in ("HardSwish", "Mul") or not is_quantized(node.outputs[0]):
            continue
        x = node.inputs[0]
        if producer_of(x, "DequantizeLinear") is None:
            continue
        builder = NodeBuilder(str(node.outputs[0].name), node)
        gate = _gate(builder, node)
        if gate is not None:
            replace_node(node, builder.add("Mul", x, gate))


def _gate(
    builder: NodeBuilder,
    node: ir.Node,
) -> ir.Value | None:
    """Return the dequantized gate of a HardSwish or of a Mul; None if it has none."""
    x = node.inputs[0]
    assert x is not None
    if node.op_type == "HardSwish":
        return _hard_sigmoid(builder, x, alpha=1 / 6, beta=0.5)
    value = node.inputs[1]
    operator = None if value is None else value.producer()
    if value is None or operator is None or operator.inputs[0] is not x:
        return None
    if operator.op_type == "HardSigmoid":
        alpha = operator.attributes.get_float("alpha", 0.2)
        beta = operator.attributes.get_float("beta", 0.5)
        return _hard_sigmoid(builder, x, alpha=alpha, beta=beta)
    if operator.op_type == "Sigmoid":
        return _dequantized(builder, value, step=_GATE_STEP)
    return None


def _hard_sigmoid(
    builder: NodeBuilder,
    x: ir.Value,
    *,
    alpha: float,
    beta: float,
) -> ir.Value:
    """Return clamp(alpha x + beta, 0, 1) in codes of `_GATE_STEP`, dequantized."""
    # QLinearAdd takes codes for both of its inputs: the largest stands for the constant.
    constant = beta / alpha
    codes = builder.constant("gate.offset", UINT8.high, UINT8.data_type)
    scale = builder.constant("gate.offset.scale", constant / UINT8.high)
    zero_point = builder.constant("gate.offset.zero_point", 0, UINT8.data_type)
    offset = builder.add("DequantizeLinear", codes, scale, zero_point)
    shifted = builder.add("Add", x, offset)
    return _dequantized(builder, shifted, step=_GATE_STEP / alpha)


def _dequantized(builder: NodeBuilder, value: ir.Value, *, step: float) -> ir.Value:
    """Return the value in codes of `step` from 0 on, read as codes of `_GATE_STEP`."""
    scale = builder.constant("gate.step", step)
    zero_point = builder.constant("gate.zero_point", 0, UINT8.data_type)
    codes = builder.add("QuantizeLinear", value, scale, zero_point)
    gate_scale = builder.constant("gate.scale", _GATE_STEP)
    return builder.add("DequantizeLinear", codes, gate_scale, zero_point)
