"""Which multiplications ONNX Runtime computes in integers, read off the graph that its
optimizer makes of a file.
"""

import re

import onnx
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.agreement import Kernels
from quantizer.export.onnx.lowering import MULTIPLYING, NUMBERED
from quantizer.export.onnx.specs import input_spec, output_spec
from quantizer.graph.ir import Graph
from quantizer.plan.groups import Layout, layout

INTEGER = {
    *(
        "QLinearConv",
        "ConvInteger",
        "QLinearMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QGemm",
    ),
    *("DynamicQuantizeMatMul", "MatMulNBits"),
}
"""ONNX Runtime's operators with integer weights."""


def kernels(model: ModelProto, optimized: str, graph: Graph, solution: Solution) -> Kernels:
    """What the multiplications of a network became; one that cannot be found again counts as
    float.

    Args:
        model: the file as it was written.
        optimized: the file that a session wrote as its `optimized_model_filepath`; its nodes
            keep the names of those that they replace, which are layers of `graph`.
    """
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    integer = tuple(_layer(node.name) for node in nodes if node.op_type in INTEGER)
    floating = [
        node
        for node in model.graph.node
        if node.op_type in MULTIPLYING and node.name not in integer
    ]
    readers = {name: node.op_type for node in model.graph.node for name in node.input}
    followers = {node.name: readers.get(node.output[0], "") for node in floating}
    where = layout(graph)
    reasons: dict[str, str] = {}
    for layer, after in followers.items():
        reasons[layer] = _why(layer, graph, where, solution, after)
    return Kernels(integer, reasons)


def _layer(name: str) -> str:
    """The layer that a node's name begins with; the optimizer adds to names."""
    return re.sub(r"_token_\d+$", "", name)


def _why(layer: str, graph: Graph, where: Layout, solution: Solution, follower: str) -> str:
    """The first thing in the config that keeps a layer's multiplication in float, and what to
    write instead.

    `follower` is the operator that reads it in the file, which has none for what became bounds
    of codes.
    """
    layer = layer.partition(NUMBERED)[0]
    if layer not in graph.by_name:
        return (
            "it is part of an operator that torch.onnx took apart, or what it makes is not "
            "quantized"
        )
    node, specs = graph.by_name[layer], solution.specs
    weights = specs.get((layer, "weights"))
    if node.row.weight and weights is None:
        return "its weights are not quantized"
    if weights is not None and (weights.dtype != "int" or weights.bit_width > 8):
        return f"its weights are {_words(weights)}; 8 bits or fewer of integers have kernels"
    if node.row.transposed:
        return "ONNX Runtime has no integer kernel for transposed convolutions"
    output = output_spec(layer, graph, specs, where)
    for role, spec in (("input", input_spec(layer, graph, specs)), ("output", output)):
        if spec is None:
            return f"its {role} is not quantized"
        if spec.dtype != "int" or spec.bit_width > 8:
            return f"its {role} is {_words(spec)}; 8 bits or fewer of integers have kernels"
        if role == "output" and spec.round_mode != "half_even":
            return (
                f"its {role} is rounded by operators in float: set round_mode to "
                '"half_even", '
                "or --onnx_profile fast"
            )
    is_activated = any(
        graph.by_name[name].row.kind == "fusable" for name in graph.consumers[layer] if name
    )
    if is_activated and follower != "QuantizeLinear":
        return (
            f"{follower} follows it, and its output is quantized after that; ReLU and ReLU6 "
            "have integer kernels"
        )
    return "ONNX Runtime does not fuse it"


def _words(spec: QuantizationSpec) -> str:
    return f"in {spec.bit_width} bits" if spec.dtype == "int" else spec.dtype
