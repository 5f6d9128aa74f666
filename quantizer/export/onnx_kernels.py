"""Which multiplications ONNX Runtime computes in integers, read off the graph that its optimizer makes of a file."""

import re
from collections.abc import Iterable

import onnx

from quantizer.config.model import QuantizationSpec
from quantizer.engine.solution import Solution
from quantizer.export.agreement import Kernels
from quantizer.export.onnx_lowering import MULTIPLYING
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key

INTEGER = {
    *("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"),
    *("DynamicQuantizeMatMul", "MatMulNBits"),
}
"""ONNX Runtime's operators with integer weights."""
FLOAT = {"Conv", "FusedConv", "ConvTranspose", "MatMul", "FusedMatMul", "Gemm", "FusedGemm"}


def kernels(content: bytes, optimized: str, graph: Graph, solution: Solution) -> Kernels:
    """What the multiplications of a network became; one that cannot be found again counts as float.

    Args:
        content: the file as it was written.
        optimized: the file that a session wrote as its `optimized_model_filepath`; its nodes keep the names of those
            that they replace, which are layers of `graph`.
    """
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    integer = tuple(_layer(node.name) for node in nodes if node.op_type in INTEGER)
    floating = [_layer(node.name) for node in nodes if node.op_type in FLOAT]
    written = onnx.load_model_from_string(content).graph.node
    floating += [
        node.name for node in written if node.op_type in MULTIPLYING and node.name not in (*integer, *floating)
    ]
    return Kernels(integer, {layer: _why(layer, graph, solution) for layer in floating})


def _layer(name: str) -> str:
    """The layer that a node's name begins with; the optimizer adds to names."""
    return re.sub(r"_token_\d+$", "", name)


def _why(layer: str, graph: Graph, solution: Solution) -> str:
    """The first thing in the config that keeps a layer's multiplication in float, and what to write instead."""
    if layer not in graph.by_name:
        return "torch.onnx made it of another operator"
    node, specs = graph.by_name[layer], {key: tensor.spec for key, tensor in solution.tensors.items()}
    weights = specs.get((layer, "weights"))
    if node.row.weight and weights is None:
        return "its weights are not quantized"
    if weights is not None and (weights.dtype != "int" or weights.bit_width > 8):
        return f"its weights are {_words(weights)}; 8 bits or fewer of integers have kernels"
    if node.row.transposed:
        return "ONNX Runtime has no integer kernel for transposed convolutions"
    for role, spec in (("input", _input(layer, graph, solution)), ("output", _output(layer, graph, solution))):
        if spec is None:
            return f"its {role} is not quantized"
        if spec.dtype != "int" or spec.bit_width > 8:
            return f"its {role} is {_words(spec)}; 8 bits or fewer of integers have kernels"
        if spec.round_mode != "half_even":
            return f'its {role} is rounded by operators in float: set round_mode to "half_even"'
    return "ONNX Runtime does not fuse it"


def _words(spec: QuantizationSpec) -> str:
    return f"in {spec.bit_width} bits" if spec.dtype == "int" else spec.dtype


def _input(layer: str, graph: Graph, solution: Solution) -> QuantizationSpec | None:
    """How what a layer reads is quantized: by itself, or where it was made."""
    return _first(solution, [(layer, "input"), *_up(layer, graph)])


def _output(layer: str, graph: Graph, solution: Solution) -> QuantizationSpec | None:
    """How what a layer makes is quantized: at the layer, or after what alone reads it."""
    return _first(solution, ((name, "activation") for name in _down(layer, graph)))


def _first(solution: Solution, keys: Iterable[Key]) -> QuantizationSpec | None:
    return next((solution.tensors[key].spec for key in keys if key in solution.tensors), None)


def _up(layer: str, graph: Graph) -> Iterable[Key]:
    """The layer's source, and those that only hand its value on."""
    node = graph.source(graph.by_name[layer])
    while node is not None:
        yield node.name, "input" if node.op == "input" else "activation"
        node = graph.source(node) if node.row.keeps_scale else None


def _down(layer: str, graph: Graph) -> Iterable[str]:
    """The layer, and what alone reads the one before, up to the next with a weight."""
    while True:
        yield layer
        readers = graph.consumers[layer]
        if len(readers) != 1 or not readers[0] or graph.by_name[readers[0]].row.weight:
            return
        layer = readers[0]
