"""Marks: the places in a translated network where a quantization belongs, and what it is."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.arithmetic.biases import SumBias
from quantizer.export.arithmetic.operands import is_multiplied, layer_input_spec
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
        specs: dict[Key, QuantizationSpec] = {}
        for key, tensor in self.quantizations:
            if key not in self.left_out:
                specs[key] = tensor.spec
        return specs

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
