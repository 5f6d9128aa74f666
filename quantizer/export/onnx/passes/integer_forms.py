"""Writes operators in the form for which engines have kernels of integers.

torch.onnx writes an average pool with one output as ReduceMean, which ONNX Runtime computes in
floats. Between quantized values, GlobalAveragePool runs as QLinearGlobalAveragePool.

For `--onnx_profile fast` and `tuned`, the gates of hard-swish and SiLU get 8 bits. x * gate(x)
then runs as QLinearMul, and a sigmoid as a table, instead of in floats. A hard-sigmoid is
clamp(a x + b, 0, 1). If x has codes where it is 0 and 1, it is a Clip of these codes, read with
another scale and zero point.

Otherwise it is an Add: x + b / a with codes from 0 to 1 / a. Their ends clamp it. Read with a
scale a times as large, the codes are those of the gate. So it runs as QLinearAdd.

Rows are looked up in the codes of a quantized table, so that no call dequantizes the whole
table. Codes that follow from constants alone, such as table rows at fixed positions, are
computed. ONNX Runtime keeps DequantizeLinear for its kernels and does not compute it ahead. It
would compute constant codes when it loads the file. OpenVINO fails on some.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from quantizer.export.onnx.builder import (
    NodeBuilder,
    add_initializer,
    array_of,
    attributes_of,
    inputs_of,
    is_constant,
    is_quantized,
    nodes_of,
    operand,
    producer_of,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.lowering import EIGHT_BITS, UINT8, Lowering

# The first two axes of an image are samples and channels.
_FIRST_POSITION = 2
# Gates are between 0 and 1
_GATE_STEP = 1 / 255
# How far a number of steps may be from a whole one to count as whole
_TINY_SHARE = 1e-3
# More than the rounding error of a sum in float32, as a share of it
_ROUNDING = 2**-20


def quantize_gates(model: ir.Model, lowering: Lowering) -> None:
    """Replace each hard-sigmoid between codes by an Add, which has the same codes.

    If the conventions say so, also quantize each gate whose product with its own quantized
    input is quantized.
    """
    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        has_codes = producer_of(x, "DequantizeLinear") is not None
        if not has_codes or not is_quantized(node.outputs[0]):
            continue
        if node.op_type == "HardSigmoid":
            _add_in_integers(node)
        is_product = node.op_type in ("HardSwish", "Mul")
        if not is_product or not lowering.conventions.quantizes_gates:
            continue
        builder = NodeBuilder(str(node.outputs[0].name), node)
        gate = _gate(builder, node)
        if gate is not None:
            replace_node(node, builder.add("Mul", x, gate))


def _gate(builder: NodeBuilder, node: ir.Node) -> ir.Value | None:
    """Return the dequantized gate of a HardSwish or of a Mul; None if it has none."""
    x = operand(node)
    if node.op_type == "HardSwish":
        return _hard_sigmoid(builder, x, alpha=1 / 6, beta=0.5)
    value = node.inputs[1]
    operator = None if value is None else value.producer()
    if value is None or operator is None or operator.inputs[0] is not x:
        return None
    if operator.op_type == "HardSigmoid":
        alpha, beta = _slope(operator)
        return _hard_sigmoid(builder, x, alpha=alpha, beta=beta)
    if operator.op_type == "Sigmoid":
        return _dequantized(builder, value, step=_GATE_STEP)
    return None


def _slope(hard_sigmoid: ir.Node) -> tuple[float, float]:
    """Return alpha and beta of a HardSigmoid."""
    attributes = hard_sigmoid.attributes
    return attributes.get_float("alpha", 0.2), attributes.get_float("beta", 0.5)


def _add_in_integers(hard_sigmoid: ir.Node) -> None:
    """Replace a HardSigmoid between codes by an Add, if the ends of its codes clamp it.

    Codes of x + beta / alpha, with a step 1 / alpha times as large, are the same.
    """
    x = hard_sigmoid.inputs[0]
    readers = hard_sigmoid.outputs[0].consumers()
    if x is None or len(readers) != 1:
        return
    quantize = readers[0]
    _, step_value, zero_point = quantize.inputs
    step_array = array_of(step_value)
    zero = array_of(zero_point)
    if step_array is None or zero is None:
        return
    step = float(step_array)
    if zero.dtype != "uint8" or zero.any():
        return
    if round(1 / step) < UINT8.high:
        # The gate's largest value, 1, has a code below 255, where the codes do not end
        return
    alpha, beta = _slope(hard_sigmoid)
    builder = NodeBuilder(str(hard_sigmoid.outputs[0].name), hard_sigmoid)
    # With beta 0.5, the gate of x = 0 is halfway between two codes. So the constant is moved a
    # little toward the code that test mode rounds to
    code = round(float(np.float32(beta) / step_array))
    share = -_ROUNDING
    if code * step > beta:
        share = _ROUNDING
    constant = beta / alpha * (1 + share)
    shifted = _shifted(builder, x, constant)
    wide_step = builder.constant("gate.step", step / alpha)
    quantize.replace_input_with(1, wide_step)
    replace_node(hard_sigmoid, shifted)


def _hard_sigmoid(builder: NodeBuilder, x: ir.Value, *, alpha: float, beta: float) -> ir.Value:
    """Return clamp(alpha x + beta, 0, 1), dequantized from codes."""
    clipped = _clipped_codes(builder, x, alpha=alpha, beta=beta)
    if clipped is not None:
        return clipped
    shifted = _shifted(builder, x, beta / alpha)
    return _dequantized(builder, shifted, step=_GATE_STEP / alpha)


def _shifted(builder: NodeBuilder, x: ir.Value, constant: float) -> ir.Value:
    """Return `x` plus a constant."""
    # QLinearAdd takes codes for both of its inputs: the largest stands for the constant.
    codes = builder.constant("gate.offset", UINT8.high, UINT8.data_type)
    scale = builder.constant("gate.offset.scale", constant / UINT8.high)
    zero_point = builder.constant("gate.offset.zero_point", 0, UINT8.data_type)
    offset = builder.add("DequantizeLinear", codes, scale, zero_point)
    return builder.add("Add", x, offset)


def _clipped_codes(
    builder: NodeBuilder, x: ir.Value, *, alpha: float, beta: float
) -> ir.Value | None:
    """Return clamp(alpha x + beta, 0, 1) from clipped codes of `x`.

    Return None if no code of `x` is where the gate becomes 0, or if an end of the slope is not
    a whole number of steps from zero.
    """
    dequantize = producer_of(x, "DequantizeLinear")
    assert dequantize is not None
    codes, scale, zero_point = dequantize.inputs
    step_array = array_of(scale)
    zero = array_of(zero_point)
    if step_array is None or zero is None:
        return None
    if zero.dtype != "uint8":
        return None
    step = float(step_array)
    to_first = beta / alpha / step
    to_last = (1 - beta) / alpha / step
    first = int(zero) - round(to_first)
    last = int(zero) + round(to_last)
    if first < UINT8.low:
        return None
    if not _is_whole(to_first) or not _is_whole(to_last):
        return None
    kind = UINT8.data_type
    if first > UINT8.low or last < UINT8.high:
        end = min(last, UINT8.high)
        low = builder.constant("gate.low", first, kind)
        high = builder.constant("gate.high", end, kind)
        assert codes is not None
        codes = builder.add("Clip", codes, low, high)
    gate_scale = builder.constant("gate.scale", 1 / (last - first))
    gate_zero = builder.constant("gate.zero_point", first, kind)
    return builder.add("DequantizeLinear", codes, gate_scale, gate_zero)


def _is_whole(count: float) -> bool:
    """Return whether a number of steps is whole and not 0."""
    return round(count) > 0 and abs(count - round(count)) < _TINY_SHARE


def _dequantized(builder: NodeBuilder, value: ir.Value, *, step: float) -> ir.Value:
    """Return the value in codes of `step` from 0 on, read as codes of `_GATE_STEP`."""
    scale = builder.constant("gate.step", step)
    zero_point = builder.constant("gate.zero_point", 0, UINT8.data_type)
    codes = builder.add("QuantizeLinear", value, scale, zero_point)
    gate_scale = builder.constant("gate.scale", _GATE_STEP)
    return builder.add("DequantizeLinear", codes, gate_scale, zero_point)


def pool_globally(model: ir.Model, lowering: Lowering) -> None:
    """Replace each ReduceMean over all positions whose input and output are quantized."""
    for node in nodes_of(model.graph, "ReduceMean"):
        x = node.inputs[0]
        if not _averages_positions(node) or producer_of(x, "DequantizeLinear") is None:
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


# The types of codes that ONNX Runtime's Gather takes.
_GATHERED_TYPES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32)


def look_up_codes(model: ir.Model, lowering: Lowering) -> None:
    """Replace each Gather of rows of a dequantized table by one of its codes."""
    for node in nodes_of(model.graph, "DequantizeLinear"):
        if not _is_table(node):
            continue
        for gather in node.outputs[0].consumers():
            replace_node(gather, _rows(node, gather))
        remove_node(node)


def _is_table(dequantize: ir.Node) -> bool:
    """Return whether codes are a constant table of which only rows are read."""
    codes = dequantize.inputs[0]
    table = dequantize.outputs[0]
    if codes is None or not is_constant(codes) or codes.dtype not in _GATHERED_TYPES:
        return False
    attributes = dequantize.attributes
    if "block_size" in attributes and attributes["axis"].as_int() not in (1, -1):
        # A block of scales spans several rows.
        return False
    if table.is_graph_output():
        return False
    return all(_is_lookup(reader, table) for reader in table.consumers())


def _is_lookup(node: ir.Node, table: ir.Value) -> bool:
    """Return whether a node picks rows of a table and does nothing else with it."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    return node.inputs[0] is table and node.inputs[1] is not table


def _rows(dequantize: ir.Node, gather: ir.Node) -> ir.Value:
    """Add nodes that pick codes, and scales if rows have their own, and dequantize them."""
    codes, scale, *zero_points = dequantize.inputs
    indices = gather.inputs[1]
    attributes = attributes_of(dequantize)
    builder = NodeBuilder(f"{gather.outputs[0].name}.rows", gather)
    picked = builder.add("Gather", codes, indices)
    assert scale is not None and scale.shape is not None
    rank = len(scale.shape)
    last = attributes | {"axis": -1}
    if rank != 2 and not (rank and attributes["axis"] == 0):
        return builder.add("DequantizeLinear", picked, scale, *zero_points, **last)
    row_scales = builder.add("Gather", scale, indices)
    if "block_size" in attributes:
        row_zeros = [builder.add("Gather", zero_point, indices) for zero_point in zero_points]
        return builder.add("DequantizeLinear", picked, row_scales, *row_zeros, **last)
    last_axis = builder.indices("axis", [-1])
    floats = builder.cast(picked, ir.DataType.FLOAT)
    for zero_point in zero_points:
        zero_array = array_of(zero_point)
        if zero_array is not None and zero_array.any():
            row_zero = builder.add("Gather", zero_point, indices)
            column = builder.add("Unsqueeze", row_zero, last_axis)
            distance = builder.cast(column, ir.DataType.FLOAT)
            floats = builder.add("Sub", floats, distance)
    return builder.add("Mul", floats, builder.add("Unsqueeze", row_scales, last_axis))


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
        value.replace_all_uses_with(constant)
        _remove_unread(producer)


def _has_8_bit_zero_point(node: ir.Node) -> bool:
    """Return whether the codes of a DequantizeLinear have a type that numpy has, too."""
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    return zero_point is not None and is_constant(zero_point) and zero_point.dtype in EIGHT_BITS


def _compute(model: ir.Model, values: Sequence[ir.Value]) -> list[Any]:
    """Return the arrays of values that follow from initializers."""
    graph = ir.convenience.extract(model.graph, [], values)
    part = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
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
