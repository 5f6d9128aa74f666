"""For `--onnx_profile fast`: gates of hard-swish and SiLU in 8 bits, by which ONNX Runtime
multiplies in integers.
"""

import torch
from onnx import ModelProto, NodeProto

from quantizer.export.onnx.nodes import Emission
from quantizer.export.onnx.tensors import UINT8

STEP = 1 / 255
"""Gates are between 0 and 1."""
GATES = {"Sigmoid", "HardSigmoid"}


def quantize_gates(model: ModelProto) -> None:
    """Put QuantizeLinear and DequantizeLinear after each gate whose product with its own input
    is quantized.

    x * gate(x) then runs as QLinearMul, and a sigmoid as a table, instead of in floats; both
    factors have 8 bits. A HardSwish becomes its two operators.
    """
    graph = model.graph
    makers = {output: node for node in graph.node for output in node.output}
    quantized = {
        name
        for node in graph.node
        if node.op_type == "QuantizeLinear"
        for name in node.input[:1]
    }
    nodes: list[NodeProto] = []
    for node in graph.node:
        emission = None
        if node.output[0] in quantized and _is_dequantized(makers.get(node.input[0])):
            emission = (
                _hard_swish(node) if node.op_type == "HardSwish" else _gated(node, makers)
            )
        nodes += emission.nodes if emission else [node]
        graph.initializer.extend(emission.initializers if emission else ())
    del graph.node[:]
    graph.node.extend(nodes)


def _is_dequantized(node: NodeProto | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


def _hard_swish(node: NodeProto) -> Emission:
    x, y = node.input[0], node.output[0]
    emission = Emission(y)
    gate = emission.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    emission.add("Mul", x, _in_codes(emission, gate), output=y)
    return emission


def _gated(node: NodeProto, makers: dict[str, NodeProto]) -> Emission | None:
    """The product with its gate quantized; None for any other node."""
    gate = makers.get(node.input[1]) if node.op_type == "Mul" else None
    if gate is None or gate.op_type not in GATES or gate.input[0] != node.input[0]:
        return None
    emission = Emission(node.output[0])
    emission.add(
        "Mul", node.input[0], _in_codes(emission, gate.output[0]), output=node.output[0]
    )
    return emission


def _in_codes(emission: Emission, gate: str) -> str:
    scale = emission.constant("gate.scale", STEP)
    zero = emission.codes("gate.zero_point", torch.tensor(0), UINT8)
    return emission.add(
        "DequantizeLinear", emission.add("QuantizeLinear", gate, scale, zero), scale, zero
    )
