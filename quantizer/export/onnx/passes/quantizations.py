"""Replaces marks: by nodes that quantize activations, and by codes for weights."""

import math

import onnx_ir as ir

from quantizer.config.roles import is_parameter, parameter_name
from quantizer.export.arithmetic import is_multiplied
from quantizer.export.onnx.activations import (
    UNBOUNDED,
    QuantizedRows,
    has_row_codes,
    quantize_activation,
    quantize_dynamic,
    quantize_row_codes,
    scale_rows,
    takes_bounds,
)
from quantizer.export.onnx.builder import (
    NodeBuilder,
    array_of,
    operand,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.lowering import MULTIPLYING, Lowering, is_mark, marks_of
from quantizer.export.onnx.passes.moves import MOVE_OPERATORS
from quantizer.export.onnx.passes.products import TRANSPOSED_KEY
from quantizer.export.onnx.restated import PACKED_BLOCK_SIZES
from quantizer.export.onnx.weights import packed_product, quantize_weights
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.plan.model import Key

# Operators with a weight for several gates, and what torch.onnx puts before them to arrange it.
_RECURRENT = ("LSTM", "GRU", "RNN", "Slice", "Split", "Squeeze", "Unsqueeze")
_ACTIVATION_FUNCTIONS = ("Relu", "Clip", "LeakyRelu")
# ONNX Runtime's QLinearSoftmax does not round but truncates, and a value above the largest code
# wraps around to 0. So it must not fuse the operator with the quantization after it.
_NOT_FUSED = ("Softmax",)


def replace_marks(model: ir.Model, lowering: Lowering) -> None:
    """Replace all marks, and the products that need another form."""
    _remove_left_out(model.graph, lowering)
    replacement = _Replacement(model.graph, lowering)
    for node in list(model.graph):
        if is_mark(node):
            replacement.replace_mark(node)
        elif node.op_type == "MatMul":
            replacement.replace_product(node)


def _remove_left_out(graph: ir.Graph, lowering: Lowering) -> None:
    """Remove the marks of activations that stay in float."""
    for mark in marks_of(graph):
        key, _ = lowering.marked(mark)
        if key not in lowering.left_out:
            continue
        source = operand(mark)
        result = mark.outputs[0]
        if result.is_graph_output():
            # Its name must stay, and the source may be an input
            source = NodeBuilder(f"{key[0]}.{key[1]}", mark).add("Identity", source)
            replace_node(mark, source)
            continue
        result.replace_all_uses_with(source)
        remove_node(mark)


class _Replacement:
    """Replaces the marks of a graph one by one."""

    def __init__(self, graph: ir.Graph, lowering: Lowering) -> None:
        self.graph = graph
        self.lowering = lowering
        # Weights that are stored as [inputs, outputs], by the products that read them. They are
        # collected before any mark is replaced.
        self.product_weights: dict[ir.Node, QuantizedTensor] = {}
        for node in graph:
            weight = node.inputs[1] if node.op_type == "MatMul" else None
            tensor = lowering.weight_of(weight)
            if weight is not None and tensor is not None and TRANSPOSED_KEY in weight.meta:
                self.product_weights[node] = tensor
        self.row_marks = self._row_marks()
        self.rows: dict[ir.Value, QuantizedRows] = {}

    def replace_mark(self, mark: ir.Node) -> None:
        """Replace a mark by the nodes of its quantization."""
        (layer, role), tensor = self.lowering.marked(mark)
        builder = NodeBuilder(f"{layer}.{role}", mark)
        result = mark.outputs[0]
        if is_parameter(role):
            if TRANSPOSED_KEY not in result.meta or not self._is_packed(tensor, result):
                replace_node(mark, self._weight(builder, mark, (layer, role), tensor))
            return
        source = operand(mark)
        if mark in self.row_marks:
            rows = quantize_row_codes(builder, tensor.spec, source)
            self.rows[rows.codes] = rows
            replace_node(mark, rows.codes)
            return
        replace_node(mark, self._activation(builder, mark, source, tensor))
        if not source.uses() and not source.is_graph_output():
            # A Relu or Clip that is now part of the quantization.
            cut = source.producer()
            assert cut is not None
            remove_node(cut)

    def replace_product(self, product: ir.Node) -> None:
        """Replace a MatMul that reads quantized rows or packed weights."""
        x, weight = product.inputs
        assert x is not None and weight is not None and product.name is not None
        tensor = self.product_weights.get(product)
        builder = NodeBuilder(product.name, product)
        if tensor is not None and self._is_packed(tensor, weight):
            mark = weight.producer()
            replace_node(product, packed_product(builder, tensor, x))
            if mark is not None and not weight.uses():
                remove_node(mark)
        elif tensor is not None and x in self.rows:
            replace_node(product, scale_rows(builder, self.rows[x], tensor, weight))

    def _row_marks(self) -> set[ir.Node]:
        """Return the marks with a scale for each row that only products of 8-bit codes read."""
        marks: set[ir.Node] = set()
        for mark in marks_of(self.graph):
            _, tensor = self.lowering.marked(mark)
            result = mark.outputs[0]
            readers = result.consumers()
            if not has_row_codes(tensor.spec) or result.is_graph_output() or not readers:
                continue
            if all(self._multiplies_int8(reader) for reader in readers):
                marks.add(mark)
        return marks

    def _multiplies_int8(self, node: ir.Node) -> bool:
        """Return whether a node multiplies by 8-bit codes with a scale for each output."""
        tensor = self.product_weights.get(node)
        if tensor is None or tensor.codes is None:
            return False
        spec = tensor.spec
        by_output = spec.qscheme == "per_tensor" or spec.ch_axis == 0
        return spec.dtype == "int" and spec.bit_width == 8 and by_output

    def _is_packed(self, tensor: QuantizedTensor, weight: ir.Value) -> bool:
        """Return whether a weight is in groups of a size that MatMulNBits has."""
        if (
            not self.lowering.conventions.is_packed
            or tensor.codes is None
            or weight.is_graph_output()
        ):
            return False
        spec = tensor.spec
        is_grouped = spec.dtype == "int" and spec.qscheme == "per_group"
        return is_grouped and spec.group_size in PACKED_BLOCK_SIZES

    def _weight(
        self, builder: NodeBuilder, mark: ir.Node, key: Key, tensor: QuantizedTensor
    ) -> ir.Value:
        """Add a weight as codes, or as floats where they have to stay."""
        layer, role = key
        result = mark.outputs[0]
        is_transposed = TRANSPOSED_KEY in result.meta
        module = self.lowering.network.layers[layer]
        values = module.get_parameter(parameter_name(role)).detach()
        weight: ir.Value | None = None
        if self._has_codes(result, key):
            weight = quantize_weights(
                builder,
                tensor,
                values,
                self.lowering.opset,
                transposed=is_transposed,
                ahead=self._is_ahead(result, layer, tensor),
            )
        if weight is not None:
            return weight
        floats = values.T if is_transposed else values
        return builder.constant("values", floats)

    def _has_codes(self, weight: ir.Value, key: Key) -> bool:
        """Return whether the profile writes a weight as codes if it can."""
        if self.lowering.conventions.is_for_kernels:
            return True
        layer, role = key
        if role != "weights" or not is_multiplied(self.lowering.network.graph.by_name[layer]):
            return False
        return all(reader.op_type in MULTIPLYING for reader in weight.consumers())

    def _is_ahead(self, weight: ir.Value, layer: str, tensor: QuantizedTensor) -> bool:
        """Return whether a weight is computed when ONNX Runtime loads the file."""
        is_for_kernels = self.lowering.conventions.is_for_kernels
        if not is_for_kernels or TRANSPOSED_KEY in weight.meta:
            return False
        if self.lowering.decodes_ahead(layer, tensor):
            return True
        return all(self._is_float(reader, layer) for reader in weight.consumers())

    def _activation(
        self, builder: NodeBuilder, mark: ir.Node, source: ir.Value, tensor: QuantizedTensor
    ) -> ir.Value:
        result = mark.outputs[0]
        weights = [self.product_weights.get(reader) for reader in result.consumers()]
        # Kernels that multiply by codes in groups take floats
        in_floats = any(
            each is not None and each.spec.qscheme == "per_group" for each in weights
        )
        spec = tensor.spec
        if spec.is_scaled and spec.is_dynamic:
            return quantize_dynamic(builder, spec, source, in_floats=in_floats)
        producer = source.producer()
        is_for_kernels = self.lowering.conventions.is_for_kernels
        bounds = UNBOUNDED
        is_only = len(source.uses()) == 1 and not source.is_graph_output()
        if producer is not None and is_only:
            bounds = _bounds(producer)
        if not takes_bounds(tensor, bounds, self.lowering):
            bounds = UNBOUNDED
        x = source
        if producer is not None and bounds != UNBOUNDED:
            unclipped = operand(producer)
            x = unclipped
        return quantize_activation(
            builder,
            tensor,
            x,
            self.lowering,
            bounds=bounds,
            in_floats=in_floats,
            apart=is_for_kernels and producer is not None and producer.op_type in _NOT_FUSED,
        )

    def _is_float(self, reader: ir.Node, layer: str) -> bool:
        """Return whether ONNX Runtime multiplies in float what reads a layer's weight."""
        graph = self.lowering.network.graph
        if reader.op_type in _RECURRENT:
            return graph.by_name[layer].row.kind == "mac"
        has_float_input = self.lowering.has_float_input(layer)
        if reader.op_type not in ("Conv", "ConvTranspose"):
            return False
        return has_float_input or not _is_quantized_later(reader.outputs[0])


def _is_quantized_later(value: ir.Value) -> bool:
    """Return whether a value is quantized, perhaps after data movement or clipping.

    ONNX Runtime's optimizer then quantizes float weights.
    """
    for reader in value.consumers():
        if is_mark(reader):
            return True
        is_passed = reader.op_type in _ACTIVATION_FUNCTIONS or reader.op_type in MOVE_OPERATORS
        if is_passed and _is_quantized_later(reader.outputs[0]):
            return True
    return False


def _bounds(node: ir.Node) -> tuple[float, float]:
    """Return the bounds of an activation function that only clips; UNBOUNDED for others."""
    if node.op_type == "Relu":
        return 0.0, math.inf
    if node.op_type != "Clip":
        return UNBOUNDED
    bounds = list(UNBOUNDED)
    for index, end in enumerate(node.inputs[1:]):
        if end is None:
            continue
        array = array_of(end)
        if array is None:
            return UNBOUNDED
        bounds[index] = float(array)
    return bounds[0], bounds[1]
