"""Marks: the places in a translated network where a quantization belongs, and what it is.

Nodes that multiply are named after their layers, so that kernels can be reported by layer.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.arithmetic import SumBias, is_multiplied, layer_input_spec
from quantizer.export.onnx.builder import producer_of
from quantizer.export.onnx.conventions import EXACT, Conventions
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

MARK_DOMAIN = "quantizer"
MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators for which engines have kernels of integers."""
RECURRENT = ("GRU", "LSTM", "RNN")
"""Operators with matrix products inside."""
PRODUCTS = (*MULTIPLYING, *RECURRENT, "Einsum", "Attention")
"""All operators that convolve or multiply matrices."""
NUMBERED = "#"
"""Between a layer's name and the number of its product."""
INSIDE = "#inside"
"""After a layer's name, for a product that is a step on the way to what the layer makes."""
Quantizations = Sequence[tuple[Key, QuantizedTensor]]
"""What is quantized; a mark stands for one by its index."""


@dataclass(frozen=True)
class Lowering:
    """What the passes know of the network.

    Attributes:
        quantizations: by the indices of marks.
        biases: of the layers that add theirs to sums of integers.
        float_layers: those whose biases do not fit sums of integers.
        conventions: those of the profile.
        left_out: quantizations of activations that stay in float, although they are marked.
    """

    network: Network
    quantizations: Quantizations
    opset: int
    biases: Mapping[str, SumBias]
    float_layers: Collection[str]
    conventions: Conventions = EXACT
    left_out: Collection[Key] = ()

    @cached_property
    def specs(self) -> dict[Key, QuantizationSpec]:
        """Return the specs of all quantizations that are not left out."""
        return {
            key: tensor.spec for key, tensor in self.quantizations if key not in self.left_out
        }

    def has_float_input(self, layer: str) -> bool:
        """Return whether the input of a layer is not quantized."""
        graph = self.network.graph
        return layer_input_spec(layer, graph, self.specs) is None

    def decodes_ahead(self, layer: str, weights: QuantizedTensor) -> bool:
        """Return whether the weights of a product become floats when the file is loaded.

        Weights in groups do not: ONNX Runtime has kernels for them.
        """
        if not self.conventions.decodes_ahead:
            return False
        node = self.network.graph.by_name[layer]
        if not is_multiplied(node) or weights.spec.qscheme == "per_group":
            return False
        return self.has_float_input(layer)

    def marked(self, mark: ir.Node) -> tuple[Key, QuantizedTensor]:
        """Return the quantization that a mark stands for."""
        return self.quantizations[mark.attributes["index"].as_int()]

    def weight_of(self, value: ir.Value | None) -> QuantizedTensor | None:
        """Return the quantized weight if a value is its mark's."""
        mark = None if value is None else value.producer()
        if mark is None or not is_mark(mark):
            return None
        (_, role), tensor = self.marked(mark)
        return tensor if is_parameter(role) else None


def is_mark(node: ir.Node) -> bool:
    """Return whether a node is a mark."""
    return node.domain == MARK_DOMAIN


def marks_of(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the marks of a graph."""
    for node in list(graph):
        if is_mark(node):
            yield node


_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx writes which operator of the program a node comes from."""
_MOVED_GATES = ("Unsqueeze", "Concat", "Slice")
"""What is between the weights of a recurrent layer and its operator, whose gates are in another
order.
"""


def name_products(model: ir.Model, lowering: Lowering) -> None:
    """Name each node that multiplies; a layer's further products get a number.

    torch.onnx writes attention as two products. The first one is a step inside that layer.
    """
    layers = _layers(model, lowering)
    layer_of_operator: dict[str, str] = {}
    for value, layer in layers.items():
        producer = value.producer()
        if producer is not None and _SCOPES in producer.metadata_props:
            layer_of_operator[producer.metadata_props[_SCOPES]] = layer
    counts: Counter[str] = Counter()
    for node in model.graph:
        if node.op_type not in PRODUCTS:
            continue
        operator = node.metadata_props.get(_SCOPES, "")
        name = _layer(node, layers, lowering)
        if name is None and operator in layer_of_operator:
            name = layer_of_operator[operator] + INSIDE
        if name is None:
            continue
        counts[name] += 1
        node.name = name
        if counts[name] > 1:
            node.name = f"{name}{NUMBERED}{counts[name]}"


def _layers(model: ir.Model, lowering: Lowering) -> dict[ir.Value, str]:
    """Return the layers of weights, marked or not, and of values that layers make."""
    layers: dict[ir.Value, str] = {}
    for layer, module in lowering.network.module_names.items():
        weight = model.graph.initializers.get(f"network.{module}.weight")
        if weight is not None:
            layers[weight] = layer
    for mark in marks_of(model.graph):
        (layer, role), _ = lowering.marked(mark)
        is_weight = lowering.weight_of(mark.outputs[0]) is not None
        value = mark.outputs[0] if is_weight else mark.inputs[0]
        if role != "input" and value is not None:
            layers[value] = layer
            # Attention of three dimensions is computed in four.
            squeeze = producer_of(value, "Squeeze")
            if squeeze is not None and squeeze.inputs[0] is not None:
                layers.setdefault(squeeze.inputs[0], layer)
    return layers


def _layer(node: ir.Node, layers: dict[ir.Value, str], lowering: Lowering) -> str | None:
    """Return the layer whose weight a node multiplies by.

    For a product of activations, return the layer that quantizes it.
    """
    if node.op_type not in MULTIPLYING and node.outputs[0] in layers:
        return layers[node.outputs[0]]
    moves = _MOVED_GATES if node.op_type in RECURRENT else ("Transpose",)
    weight = node.inputs[1]
    while weight is not None and weight not in layers:
        producer = weight.producer()
        if producer is None or producer.op_type not in moves:
            break
        weight = producer.inputs[0]
    if weight is not None and weight in layers:
        is_weight = weight.producer() is None or lowering.weight_of(weight) is not None
        if is_weight:
            return layers[weight]
    return layers.get(node.outputs[0])
