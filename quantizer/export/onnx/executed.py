"""Finds the multiplications that a session of ONNX Runtime executes, and reports which of them
an engine computes in integers, and why not the others.

The optimized graph has the operators, and a profile of a run has the shapes of what they make.
A product is a convolution, a matrix product or a recurrent layer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.arithmetic import is_narrow, layer_input_spec, output_spec
from quantizer.export.onnx.builder import nodes_of
from quantizer.export.onnx.lowering import INSIDE, MULTIPLYING, NUMBERED, PRODUCTS, RECURRENT
from quantizer.export.onnx.passes.moves import dequantize_of
from quantizer.export.performance import Kernels, Product, Shape, einsum_multiply_adds, numbered
from quantizer.graph.ir import Graph
from quantizer.option_words import Sentence
from quantizer.plan.groups import layout
from quantizer.plan.layout import Layout
from quantizer.plan.model import Key

INTEGER_OPERATORS = (
    "QLinearConv",
    "ConvInteger",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QGemm",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "MatMulNBits",
)
"""ONNX Runtime's products with integer weights."""
OPTIMIZER_SUFFIXES = re.compile(r"(_nchwc|_nhwc|_token_\d+)+$")
"""What ONNX Runtime's optimizer appends to the name of a node or value that it merged."""
FLOAT_WEIGHTS = "its weights are not quantized"
"""Why a layer stays in float that the config leaves there."""
_WEIGHTS_OF_CONVOLUTIONS = {
    "Conv": 1,
    "FusedConv": 1,
    "NhwcFusedConv": 1,
    "ConvInteger": 1,
    "ConvTranspose": 1,
    "QLinearConv": 3,
}
"""The operand with the weights, by convolution."""
_SECOND_FACTORS = {
    "MatMul": 1,
    "FusedMatMul": 1,
    "MatMulInteger": 1,
    "MatMulIntegerToFloat": 1,
    "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3,
    "Gemm": 1,
    "FusedGemm": 1,
    "QGemm": 3,
    "MatMulNBits": 1,
}
"""The operand with the second factor, by matrix product."""
_RECURRENT_KERNELS = (*RECURRENT, "DynamicQuantizeLSTM")
_ATTENTION = ("Attention", "MultiHeadAttention")
_MULTIPLYING_KERNELS = (
    *_WEIGHTS_OF_CONVOLUTIONS,
    *_SECOND_FACTORS,
    *_RECURRENT_KERNELS,
    *_ATTENTION,
    "Einsum",
)
_KERNEL = "_kernel_time"
"""What ends the name of an event about a kernel."""


def profiled(options: onnxruntime.SessionOptions, folder: str) -> None:
    """Let a session write its profile in a folder."""
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(folder) / "profile")


def kernel_events(
    session: onnxruntime.InferenceSession,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """End the profile of a session, and yield each run of a kernel with its node's name."""
    path = Path(session.end_profiling())
    for event in json.loads(path.read_text("utf-8")):
        name = event["name"]
        if name.endswith(_KERNEL):
            yield name.removesuffix(_KERNEL), event


@dataclass
class ExecutedGraph:
    """A graph with the shapes of a run.

    Attributes:
        model: that was run.
        shapes: of values, by name.
        runs: of nodes, by name.
    """

    model: ModelProto
    shapes: dict[str, Shape] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        model: ModelProto,
        session: onnxruntime.InferenceSession,
        feed: Mapping[str, NDArray[Any]],
    ) -> "ExecutedGraph":
        """Run a session that writes a profile, and end its profile.

        Args:
            model: the graph that the session runs.
        """
        executed = cls(model)
        for name, array in feed.items():
            executed.shapes[name] = array.shape
        session.run(None, feed)
        results: dict[str, list[Shape]] = {}
        for name, event in kernel_events(session):
            executed.runs[name] += 1
            results[name] = []
            for typed in event["args"].get("output_type_shape", ()):
                results[name] += typed.values()
        for graph in _graphs(model.graph):
            for tensor in graph.initializer:
                executed.shapes[tensor.name] = tensor.dims
            for node in graph.node:
                outputs = [name for name in node.output if name]
                shapes = results.get(node.name, [])
                if len(outputs) == len(shapes):
                    executed.shapes.update(zip(outputs, shapes, strict=True))
        return executed

    def products(self, named: Mapping[str, str]) -> list[Product]:
        """Return the multiplications of the run, in order.

        Args:
            named: names for sentences, by the names of nodes and values of the file.
        """
        products: list[Product] = []
        for graph in _graphs(self.model.graph):
            for node in graph.node:
                if node.op_type not in _MULTIPLYING_KERNELS or not self.runs[node.name]:
                    continue
                operator = node.op_type
                is_integer = operator in INTEGER_OPERATORS
                size = self.runs[node.name] * self._multiply_adds(node)
                # The optimizer names a node after one of the file, or after its last value
                names = [OPTIMIZER_SUFFIXES.sub("", node.name), *node.output]
                name = known_name(names, named)
                products.append(Product(name, operator, is_integer, size))
        return products

    def _multiply_adds(self, node: NodeProto) -> int:
        """Return how many multiply-adds one run of a node takes; 0 if a shape is not known."""
        operator = node.op_type
        operands = [self.shapes.get(name) for name in node.input]
        result = self.shapes.get(next(iter(node.output)))
        first = operands[0]
        if first is None:
            return 0
        if operator in _WEIGHTS_OF_CONVOLUTIONS:
            weights = operands[_WEIGHTS_OF_CONVOLUTIONS[operator]]
            values = first if operator == "ConvTranspose" else result
            if weights is None or values is None:
                return 0
            return prod(values) * prod(weights[1:])
        if operator in _RECURRENT_KERNELS:
            weights, recurrent = operands[1:3]
            if weights is None or recurrent is None:
                return 0
            return prod(first[:-1]) * (prod(weights) + prod(recurrent))
        if operator in _ATTENTION:
            keys = operands[1]
            return 0 if keys is None else 2 * prod(first) * keys[-2]
        if operator == "Einsum":
            equations = [item.s.decode() for item in node.attribute if item.name == "equation"]
            return einsum_multiply_adds(equations[0], operands)
        if result is None:
            return 0
        if operator in ("Gemm", "FusedGemm", "QGemm"):
            return prod(first) * result[-1]
        is_transposed = any(item.name == "transA" and item.i for item in node.attribute)
        return prod(result) * first[-2 if is_transposed else -1]


def key_of_node(name: str) -> Key:
    """Return the layer and role of the activation that a node quantizes. They are of none if
    the name of the node is not `<layer>.<role>.<n>.<operator>`.

    >>> key_of_node("Net/conv.1.activation.0.QuantizeLinear")
    ('Net/conv.1', 'activation')
    """
    layer, _, role = name.rpartition(".")[0].rpartition(".")[0].rpartition(".")
    return layer, role


def names_of_products(model: ModelProto) -> dict[str, str]:
    """Return the name of the product that each node and value of a file depends on last."""
    names: dict[str, str] = {}
    for graph in _graphs(model.graph):
        for node in graph.node:
            last = ""
            for value in node.input:
                last = names.get(value, last)
            if node.op_type in (*PRODUCTS, *INTEGER_OPERATORS):
                last = node.name
            if last:
                names.update(dict.fromkeys([node.name, *node.output], last))
    return names


def known_name(names: Sequence[str], named: Mapping[str, str]) -> str:
    """Return the name of the product of the file for the first of the names that an engine has
    for an operator; the first name if there is none.

    Engines append words, as in `node_MatMul_8/MatmulTransposeFusion/`.
    """
    for name in names:
        while name:
            if name in named:
                return named[name]
            name = name.rpartition("/")[0]
    return names[0]


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


_ONNX_RUNTIME = "ONNX Runtime"
_INSIDE_AN_OPERATOR = "a step inside the operator, whose result the config does not quantize"
_BITS_LIMIT = "8 bits or fewer of integers have kernels"


def products_between_codes(model: ModelProto, products: Sequence[Product]) -> Kernels:
    """Return the products of a file whose operands are both quantized, for an engine that does
    not run here. The reason of each other product names the operands that are not.

    Args:
        model: the file.
        products: those of a run, which have the names of the file's nodes.
    """
    sizes = {product.name: product.multiply_adds for product in products}
    integer: list[str] = []
    reasons: dict[str, str] = {}
    for node in nodes_of(ir.from_proto(model).graph, *PRODUCTS):
        name = str(node.name)
        if node.op_type not in MULTIPLYING:
            reasons[name] = f"engines compute {node.op_type} in float"
            continue
        # An engine moves a dequantization behind data movement
        operands = dict(zip(("input", "weights"), node.inputs[:2], strict=True))
        floats = [word for word, value in operands.items() if dequantize_of(value) is None]
        if floats:
            verb = "is" if floats == ["input"] else "are"
            reasons[name] = f"its {' and '.join(floats)} {verb} not quantized"
        else:
            integer.append(name)
    return Kernels(tuple(integer), reasons, "of quantized values", sizes)


def kernels_of_products(
    model: ModelProto,
    products: Sequence[Product],
    graph: Graph,
    solution: Solution,
    *,
    engine: str = _ONNX_RUNTIME,
    without_kernels: Sequence[str] = PRODUCTS[len(MULTIPLYING) :],
) -> Kernels:
    """Return how an engine multiplies, with the reasons for float.

    Args:
        model: the file as it was written.
        products: what the engine executes. Their names begin with those of layers.
        graph, solution: the layers, and what is quantized.
        engine: its name, for reasons.
        without_kernels: the operators of ONNX that it always computes in float.
    """
    # The types of the nodes that read and that make each value
    readers: dict[str, str] = {}
    makers: dict[str, str] = {}
    for node in model.graph.node:
        readers |= dict.fromkeys(node.input, node.op_type)
        makers |= dict.fromkeys(node.output, node.op_type)
    nodes = {node.name: node for node in model.graph.node}
    where = layout(graph)
    integer: list[str] = []
    reasons: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for product in numbered(products):
        sizes[product.name] = product.multiply_adds
        if product.is_integer:
            integer.append(product.name)
            continue
        layer = product.name.partition(NUMBERED)[0]
        # Of the file: an engine may take an operator apart
        written = nodes.get(product.name, NodeProto())
        operator = written.op_type or product.operator
        if INSIDE in product.name:
            reasons[product.name] = _INSIDE_AN_OPERATOR
        elif operator in without_kernels:
            reasons[product.name] = f"{engine} has no integer kernel for {operator}"
        else:
            reader = readers.get(next(iter(written.output), ""), "")
            reason = _reason(layer, graph, where, solution, reader=reader, engine=engine)
            if not reason and "Softmax" in map(makers.get, written.input):
                reason = "it multiplies by a softmax that the config does not quantize"
            reasons[product.name] = reason or f"{engine} does not fuse it"
    return Kernels(tuple(integer), reasons, multiply_adds=sizes)


def _reason(
    layer: str, graph: Graph, where: Layout, solution: Solution, *, reader: str, engine: str
) -> str:
    """Return the first thing in the config that keeps a layer in float, and what to change;
    empty if there is none.

    Args:
        layer: the name of the layer.
        graph, solution: the layers, and what is quantized.
        where: which values are quantized together.
        reader: the type of the node that reads the product in the file; empty without one. An
            activation that became bounds of codes is not a node.
        engine: the name of the engine.
    """
    if layer not in graph.by_name:
        return (
            "it is part of an operator that torch.onnx took apart, or what it makes is not "
            "quantized"
        )
    node = graph.by_name[layer]
    specs = solution.specs
    weights = specs.get((layer, "weights"))
    if node.row.weight and weights is None:
        return FLOAT_WEIGHTS
    if weights is not None and not is_narrow(weights):
        return f"its weights are {_words(weights)}; {_BITS_LIMIT}"
    if node.row.transposed and engine == _ONNX_RUNTIME:
        return "ONNX Runtime has no integer kernel for transposed convolutions"
    activations = {
        "input": layer_input_spec(layer, graph, specs),
        "output": output_spec(layer, graph, specs, where),
    }
    for role, spec in activations.items():
        if spec is None:
            return f"its {role} is not quantized"
        if not is_narrow(spec):
            return f"its {role} is {_words(spec)}; {_BITS_LIMIT}"
        if role == "output" and spec.round_mode != "half_even":
            return Sentence(
                f"its {role} is rounded by operators in float: set round_mode to "
                '"half_even", or <--onnx_profile fast>'
            )
    followers = [graph.by_name[name] for name in graph.consumers[layer] if name]
    is_activated = any(follower.row.kind == "fusable" for follower in followers)
    if is_activated and reader != "QuantizeLinear":
        return (
            f"{reader} follows it, and its output is quantized after that; ReLU and ReLU6 "
            "have integer kernels"
        )
    return ""


def _words(spec: QuantizationSpec) -> str:
    """Return the bits of integers, and the name of another format.

    >>> _words(QuantizationSpec(bit_width=16))
    'in 16 bits'
    """
    if spec.dtype == "int":
        return f"in {spec.bit_width} bits"
    return spec.dtype
