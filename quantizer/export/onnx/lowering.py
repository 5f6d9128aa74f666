"""Puts quantizations where torch.onnx has translated marks: nodes for activations, codes for
weights. Names the layers that multiply.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.export.onnx.biases import SumBias
from quantizer.export.onnx.constants import folded
from quantizer.export.onnx.dynamic import (
    multiplies_integers,
    quantize_dynamic,
    quantize_rows,
    scale_rows,
)
from quantizer.export.onnx.linear import readers_of, straighten
from quantizer.export.onnx.lookup import looked_up
from quantizer.export.onnx.moves import MOVES, quantized_again
from quantizer.export.onnx.nodes import (
    UNBOUNDED,
    Emission,
    clips_codes,
    quantize_activation,
    quantize_weights,
)
from quantizer.export.onnx.padding import padded_apart, sizes_of
from quantizer.export.onnx.profile import packed_product
from quantizer.export.onnx.sizes import summed_sizes
from quantizer.export.onnx.specs import BLOCKS, input_spec
from quantizer.export.onnx.tensors import INT32, float_tensor
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

Wanted = Sequence[tuple[Key, QuantizedTensor]]
"""What is quantized; a mark stands for one by its index."""
APART = {"Softmax"}
"""Operators that must not become one kernel with the quantization after them: ONNX Runtime's
QLinearSoftmax does not round but cut, and a value above the largest code wraps around to 0.
"""
NUMBERED = "#"
"""Between a layer's name and the number of its product."""
DOMAIN = "quantizer"
"""Of the marks."""
_RECURRENT = ("LSTM", "GRU", "RNN", "Slice", "Split", "Squeeze", "Unsqueeze")
"""Operators with a weight for several gates, and what torch.onnx puts before them to arrange
it.
"""
_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""Operators whose weights stay float in between, and the axis of the weight that their outputs
lie along.
"""


def lower(
    model: ModelProto,
    network: Network,
    wanted: Wanted,
    biases: Mapping[str, SumBias],
    opset: int,
    *,
    packed: bool = False,
    in_float: Collection[str] = (),
) -> None:
    """Put the quantizations in where the marks are: nodes, and codes for weights; and name what
    multiplies.

    Args:
        biases: of the layers that add theirs to sums of integers.
        packed: whether weights in groups become MatMulNBits.
        in_float: layers whose biases do not fit sums of integers.
    """
    marked = Marked(model, network, wanted, opset, packed=packed)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        emission = marked.emission(node)
        if emission is None:
            nodes.append(node)
        else:
            model.graph.initializer.extend(emission.initializers)
            nodes += emission.nodes
    nodes = [node for node in nodes if not marked.is_cut(node)]
    _name_products(nodes, marked)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes, initializers = padded_apart(nodes, constants, sizes_of(values_of(model)))
    model.graph.initializer.extend(initializers)
    nodes = quantized_again(nodes, constants)
    nodes = looked_up(model, nodes)
    _add_to_sums(model, nodes, biases)
    _keep_in_float(model, nodes, in_float)
    nodes, initializers = summed_sizes(nodes, sizes_of(values_of(model)))
    model.graph.initializer.extend(initializers)
    _replace(model, folded(model, nodes))


class Marked:
    """A translated model whose quantizations are marks, with weights that multiply alone
    transposed already.
    """

    def __init__(
        self,
        model: ModelProto,
        network: Network,
        wanted: Wanted,
        opset: int,
        *,
        packed: bool = False,
    ) -> None:
        self.network, self.wanted, self.opset = network, wanted, opset
        self.specs = {key: tensor.spec for key, tensor in wanted}
        self.straight = straighten(model, lambda node: self._is_weight(node))
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.readers = readers_of(model.graph.node)
        self.outputs = {value.name for value in model.graph.output}
        self.layers = {
            f"network.{module}.weight": layer for layer, module in network.module_names.items()
        }
        named = (
            node
            for node in model.graph.node
            if _is_mark(node) and self._wanted(node)[0][1] != "input"
        )
        self.layers |= {self._named(node): self._wanted(node)[0][0] for node in named}
        self.ranks = {
            value.name: len(value.type.tensor_type.shape.dim) for value in values_of(model)
        }
        self.in_rows = self._rows(model.graph.node)
        self.in_packs = self._packs() if packed else set()
        self.cut: set[str] = set()

    def emission(self, node: NodeProto) -> Emission | None:
        """What to write in place of a mark, or of a product of integers; None for a node to be
        left as it is.
        """
        if not _is_mark(node):
            return self._product(node) if node.op_type == "MatMul" else None
        (layer, role), tensor = self._wanted(node)
        if node.output[0] in self.in_packs:
            return Emission(layer)
        if node.output[0] in self.in_rows:
            return quantize_rows(
                f"{layer}.{role}",
                tensor.spec,
                node.input[0],
                node.output[0],
                self.ranks[node.input[0]],
            )
        return (
            self._weights(node, layer, role, tensor)
            if is_parameter(role)
            else self._activation(node)
        )

    def is_cut(self, node: NodeProto) -> bool:
        """Whether the bounds of codes do what it did."""
        return node.output[0] in self.cut

    def layer(self, node: NodeProto) -> str | None:
        """The layer whose weight a node multiplies by; of a product of activations, the layer
        that quantizes it.
        """
        weight = node.input[1]
        while (
            weight not in self.layers
            and weight in self.makers
            and self.makers[weight].op_type == "Transpose"
        ):
            weight = self.makers[weight].input[0]
        maker = self.makers.get(weight)
        is_weight = weight in self.layers and (maker is None or self._is_weight(maker))
        return self.layers[weight] if is_weight else self.layers.get(node.output[0])

    def _wanted(self, mark: NodeProto) -> tuple[Key, QuantizedTensor]:
        index: int = mark.attribute[0].i
        return self.wanted[index]

    def _is_weight(self, node: NodeProto) -> bool:
        return _is_mark(node) and is_parameter(self._wanted(node)[0][1])

    def _named(self, mark: NodeProto) -> str:
        """The value that is a layer's: its weight once it is quantized, and what it makes
        before.
        """
        return str(mark.output[0] if self._is_weight(mark) else mark.input[0])

    def _rows(self, nodes: Sequence[NodeProto]) -> set[str]:
        """The activations with a scale for each row that only products with codes of 8 bits
        read.
        """

        def is_product(node: NodeProto) -> bool:
            if node.op_type != "MatMul" or node.input[1] not in self.straight:
                return False
            held = self._wanted(self.makers[node.input[1]])[1]
            by_output = held.spec.qscheme == "per_tensor" or held.spec.ch_axis == 0
            return (
                held.codes is not None
                and held.spec.dtype == "int"
                and held.spec.bit_width == 8
                and by_output
            )

        marks = [
            node
            for node in nodes
            if _is_mark(node) and multiplies_integers(self._wanted(node)[1].spec)
        ]
        names = {mark.output[0] for mark in marks} - self.outputs
        return {
            name
            for name in names
            if self.readers[name] and all(map(is_product, self.readers[name]))
        }

    def _packs(self) -> set[str]:
        """The weights in groups of a size that MatMulNBits has."""

        def fits(spec: QuantizationSpec) -> bool:
            return (
                spec.dtype == "int"
                and spec.qscheme == "per_group"
                and spec.group_size in BLOCKS
            )

        held = {
            name: self._wanted(self.makers[name])[1]
            for name in self.straight
            if name not in self.outputs
        }
        return {
            name
            for name, tensor in held.items()
            if tensor.codes is not None and fits(tensor.spec)
        }

    def _product(self, node: NodeProto) -> Emission | None:
        """What becomes of a MatMul that does not stay one."""
        if node.input[1] in self.in_packs:
            tensor = self._wanted(self.makers[node.input[1]])[1]
            return packed_product(
                self.layer(node) or node.name, tensor, node.input[0], node.output[0]
            )
        if node.input[0] not in self.in_rows:
            return None
        read, held = (self._wanted(self.makers[name])[1] for name in node.input)
        return scale_rows(self.layer(node) or node.name, read.spec, held, node)

    def _weights(
        self, mark: NodeProto, layer: str, role: str, tensor: QuantizedTensor
    ) -> Emission:
        (result,) = mark.output
        name, transposed = f"{layer}.{role}", result in self.straight
        values = self.network.layers[layer].get_parameter(parameter_name(role)).detach()
        ahead = not transposed and all(
            self._is_float(reader, layer) for reader in self.readers[result]
        )
        emission = quantize_weights(
            name, tensor, values, result, self.opset, transposed=transposed, ahead=ahead
        )
        floats = values.T if transposed else values
        return emission or Emission(name, initializers=[float_tensor(result, floats)])

    def _activation(self, mark: NodeProto) -> Emission:
        (source,), (result,), ((layer, role), tensor) = (
            mark.input,
            mark.output,
            self._wanted(mark),
        )
        name = f"{layer}.{role}"
        grouped = any(self._has_groups(reader) for reader in self.readers[result])
        if tensor.spec.is_scaled and tensor.spec.is_dynamic:
            return quantize_dynamic(
                name, tensor.spec, source, result, self.ranks[source], in_floats=grouped
            )
        bounds, cut = UNBOUNDED, self.makers.get(source)
        is_only = len(self.readers[source]) == 1 and source not in self.outputs
        if cut is not None and is_only and clips_codes(tensor.spec, self.opset):
            bounds = _bounds(cut, self.tensors)
        if cut is not None and bounds != UNBOUNDED:
            self.cut.add(source)
            source = cut.input[0]
        apart = cut is not None and cut.op_type in APART
        return quantize_activation(
            name, tensor, source, result, self.opset, bounds, in_floats=grouped, apart=apart
        )

    def _is_float(self, node: NodeProto, layer: str) -> bool:
        """Whether ONNX Runtime has no kernel that multiplies what a node reads, the codes of a
        layer's weight.
        """
        if node.op_type in _RECURRENT:
            return self.network.graph.by_name[layer].row.kind == "mac"
        is_between = input_spec(layer, self.network.graph, self.specs) and self._is_rounded(
            node.output[0]
        )
        return node.op_type in ("Conv", "ConvTranspose") and not is_between

    def _is_rounded(self, name: str) -> bool:
        """Whether a value is quantized, if moved and cut off before: the optimizer then
        quantizes float weights.
        """
        passed = ("Relu", "Clip", "LeakyRelu", *MOVES)
        return any(
            _is_mark(r) or (r.op_type in passed and self._is_rounded(r.output[0]))
            for r in self.readers[name]
        )

    def _has_groups(self, node: NodeProto) -> bool:
        """Whether it multiplies by codes with scales for groups, for which kernels exist that
        take floats alone.
        """
        if node.op_type != "MatMul" or node.input[1] not in self.straight:
            return False
        return self._wanted(self.makers[node.input[1]])[1].spec.qscheme == "per_group"


def _name_products(nodes: Sequence[NodeProto], marked: Marked) -> None:
    """Call what multiplies after its layer, with a number where that has several products."""
    counts: Counter[str] = Counter()
    for node in nodes:
        layer = marked.layer(node) if node.op_type in MULTIPLYING else None
        if layer is not None:
            counts[layer] += 1
            node.name = layer if counts[layer] == 1 else f"{layer}{NUMBERED}{counts[layer]}"


def values_of(model: ModelProto) -> list[ValueInfoProto]:
    """All values with their types, as torch.onnx gives them."""
    return [*model.graph.input, *model.graph.value_info, *model.graph.output]


def _is_mark(node: NodeProto) -> bool:
    return bool(node.domain == DOMAIN)


MULTIPLYING = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def _replace(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Other nodes, and no initializers but those that they read."""
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    for index in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[index].name not in read:
            del model.graph.initializer[index]


def _bounds(node: NodeProto, tensors: Mapping[str, TensorProto]) -> tuple[float, float]:
    """Between what an activation function that only cuts off cuts its input."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type != "Clip" or any(name and name not in tensors for name in node.input[1:]):
        return UNBOUNDED
    ends = [
        float(numpy_helper.to_array(tensors[name])) if name else None for name in node.input[1:]
    ]
    low, high = (*ends, None, None)[:2]
    return -math.inf if low is None else low, math.inf if high is None else high


def _add_to_sums(
    model: ModelProto, nodes: list[NodeProto], biases: Mapping[str, SumBias]
) -> None:
    """Give convolutions the biases that their kernels add, as codes; torch.onnx has dropped
    those of zeros.
    """
    for node in [
        node
        for node in nodes
        if node.op_type == "Conv" and node.name in biases and len(node.input) == 3
    ]:
        emission, bias = Emission(f"{node.name}.bias"), biases[node.name]
        inputs = (
            emission.codes("codes", bias.codes, INT32),
            emission.constant("scale", bias.step),
        )
        node.input[2] = emission.add("DequantizeLinear", *inputs, axis=0)
        model.graph.initializer.extend(emission.initializers)
        at = nodes.index(node)
        nodes[at:at] = emission.nodes


def _keep_in_float(model: ModelProto, nodes: list[NodeProto], layers: Collection[str]) -> None:
    """Make the biases of these layers, and of layers with float weights, something that the
    optimizer cannot look into.

    Between quantized values it would else quantize such weights itself, to 8 bits per tensor,
    and such biases to other values. A bias that is computed keeps it from that, and
    DequantizeLinear is never computed ahead.
    """
    shapes = {
        t.name: tuple(t.dims)
        for t in model.graph.initializer
        if t.data_type == TensorProto.FLOAT
    }
    quantized = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    for node in list(nodes):
        is_float = (
            node.op_type in _CHANNELS and node.input[0] in quantized and node.input[1] in shapes
        )
        is_wide = node.op_type in _CHANNELS and len(node.input) == 3 and node.name in layers
        if is_float or is_wide:
            emission = Emission(f"{node.name}.bias")
            count = (
                _channels(node, shapes[node.input[1]]) if is_float else shapes[node.input[2]][0]
            )
            zeros = emission.codes("zeros", torch.zeros(count), INT32)
            bias = emission.add("DequantizeLinear", zeros, emission.constant("one", 1.0))
            if len(node.input) == 3:
                node.input[2] = emission.add("Add", node.input[2], bias)
            else:
                node.input.append(bias)
            model.graph.initializer.extend(emission.initializers)
            at = nodes.index(node)
            nodes[at:at] = emission.nodes


def _channels(node: NodeProto, shape: tuple[int, ...]) -> int:
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if attributes.get("transB"):
        return shape[0]
    return shape[_CHANNELS[node.op_type]] * (
        attributes.get("group", 1) if node.op_type == "ConvTranspose" else 1
    )
