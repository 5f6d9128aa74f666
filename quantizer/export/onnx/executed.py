"""Finds the multiplications that a session of ONNX Runtime executes, with their sizes.

The optimized graph has the operators, and a profile of a run has the shapes of what they make.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper

from quantizer.export.kernels import Product, Shape, einsum_multiply_adds
from quantizer.export.onnx.marks import PRODUCTS, RECURRENT

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
                name = _original_name(node, named)
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
            return einsum_multiply_adds(_equation(node), operands)
        if result is None:
            return 0
        if operator in ("Gemm", "FusedGemm", "QGemm"):
            return prod(first) * result[-1]
        is_transposed = any(item.name == "transA" and item.i for item in node.attribute)
        return prod(result) * first[-2 if is_transposed else -1]


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


def _original_name(node: NodeProto, named: Mapping[str, str]) -> str:
    """Return the name of the product of the file that a node was made of.

    The optimizer keeps names, appends words to them, or names a node after the last value of
    those that it has merged.
    """
    name = OPTIMIZER_SUFFIXES.sub("", node.name)
    for candidate in (name, *node.output):
        if candidate in named:
            return named[candidate]
    # As in `node_MatMul_8/MatmulTransposeFusion/`
    while "/" in name:
        name = name.rpartition("/")[0]
        if name in named:
            return named[name]
    return node.name


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph, and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _equation(node: NodeProto) -> str:
    """Return the equation of an Einsum."""
    for attribute in node.attribute:
        if attribute.name == "equation":
            return str(helper.get_attribute_value(attribute).decode())
    return ""
