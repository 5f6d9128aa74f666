"""Rewrites linear layers to the form of the profile, and biases as engines add them. Names
nodes that multiply after their layers, so that kernels can be reported by layer.

ONNX Runtime multiplies fastest in MatMul with a weight stored as [inputs, outputs], then Sub.

A Transpose between codes and MatMul, or a Gemm, would keep ONNX Runtime from its kernels of
4-bit weights. It fuses MatMul and Add into a Gemm. That has no integer kernel if the output is
not quantized, and otherwise one with a rounded bias. Subtracting the negated bias gives the
same floats and is not fused.

NPUs take Gemm, which has an operand for the bias and takes two dimensions.

Biases are codes that are added to sums of integers, or floats that ONNX Runtime's optimizer
cannot look into. Between quantized values it would quantize float weights itself, to 8 bits per
tensor, and biases that do not fit int32 to other values. It does neither if the bias is
computed, and it never computes DequantizeLinear ahead.

OpenVINO takes the size of a batch from the output of a convolution before its bias. If the sum
with the bias is quantized, it then adds another bias. A size that is computed as a sum can only
be taken from that sum.
"""

import re
from collections import Counter

import numpy as np
import onnx_ir as ir
import torch

from quantizer.export.onnx.builder import (
    NodeBuilder,
    add_initializer,
    array_of,
    nodes_of,
    producer_of,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.lowering import (
    INSIDE,
    MULTIPLYING,
    NUMBERED,
    PRODUCTS,
    RECURRENT,
    LinearForm,
    Lowering,
    marks_of,
)
from quantizer.export.onnx.passes.moves import PASSED_OPERATORS

TRANSPOSED_KEY = "transposed"
"""In the metadata of marked weights that are used as [inputs, outputs]."""


def straighten_linear(model: ir.Model, lowering: Lowering) -> None:
    """Rewrite every product with a marked weight."""
    form = lowering.conventions.linear
    for mark in marks_of(model.graph):
        weight = mark.outputs[0]
        if lowering.weight_of(weight) is None:
            continue
        readers = weight.consumers()
        if form is LinearForm.GEMM:
            for transpose in filter(_swaps_two_axes, readers):
                _write_gemms(transpose, weight)
            continue
        (layer, _), tensor = lowering.marked(mark)
        if weight.is_graph_output() or lowering.decodes_ahead(layer, tensor):
            continue
        if readers and all(_only_transposes(reader, weight) for reader in readers):
            weight.meta[TRANSPOSED_KEY] = True
            for reader in readers:
                _use_as_stored(reader, weight)
            if form is LinearForm.ADDED:
                continue
            for product in weight.consumers():
                if product.op_type == "MatMul" and product.inputs[1] is weight:
                    _subtract_bias(model.graph, product)


def _swaps_two_axes(node: ir.Node) -> bool:
    """Return whether a node is the Transpose of a matrix inside the graph."""
    if node.op_type != "Transpose" or node.outputs[0].is_graph_output():
        return False
    return list(node.attributes.get_ints("perm", ())) == [1, 0]


def _only_transposes(node: ir.Node, weight: ir.Value) -> bool:
    """Return whether a node uses a weight [outputs, inputs] only as its transpose."""
    if node.op_type != "Gemm" or node.inputs[1] is not weight:
        return _swaps_two_axes(node)
    attributes = node.attributes
    is_scaled = attributes.get_float("alpha", 1.0) != 1.0
    is_bias_scaled = attributes.get_float("beta", 1.0) != 1.0
    is_transposed = attributes.get_int("transB", 0) == 1 and not attributes.get_int("transA", 0)
    return is_transposed and not is_scaled and not is_bias_scaled


def _use_as_stored(node: ir.Node, weight: ir.Value) -> None:
    """Remove a Transpose of a weight, or turn a Gemm into MatMul and Add."""
    if node.op_type == "Transpose":
        node.outputs[0].replace_all_uses_with(weight)
        remove_node(node)
        return
    result = node.outputs[0]
    builder = NodeBuilder(f"{result.name}.product", node)
    total = builder.add("MatMul", node.inputs[0], weight, node_name=node.name)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        total = builder.add("Add", total, node.inputs[2])
    replace_node(node, total)


def _bias_after(product: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add that is the only reader of a product, and its bias; None without one."""
    readers = product.outputs[0].consumers()
    if len(readers) != 1 or readers[0].op_type != "Add":
        return None
    for operand in readers[0].inputs:
        values = array_of(operand)
        if operand is not None and values is not None and values.ndim == 1:
            return readers[0], operand
    return None


def _subtract_bias(graph: ir.Graph, product: ir.Node) -> None:
    """Turn the Add of a bias after a product into a Sub of the negated bias."""
    found = _bias_after(product)
    if found is None:
        return
    add, bias = found
    values = array_of(bias)
    assert values is not None
    name = f"{bias.name}.negated"
    negated = graph.initializers.get(name)
    if negated is None:
        negated = add_initializer(graph, ir.Tensor(np.negative(values), name=name))
    add.op_type = "Sub"
    add.replace_input_with(0, product.outputs[0])
    add.replace_input_with(1, negated)


def _write_gemms(transpose: ir.Node, weight: ir.Value) -> None:
    """Replace the products with a transposed weight [outputs, inputs]."""
    transposed = transpose.outputs[0]
    for node in transposed.consumers():
        x = node.inputs[0]
        is_product = node.op_type == "MatMul" and node.inputs[1] is transposed
        if is_product and x is not None and x.shape is not None:
            _write_gemm(node, x, weight)
    if not transposed.uses():
        remove_node(transpose)


def _write_gemm(product: ir.Node, x: ir.Value, weight: ir.Value) -> None:
    """Replace a product by a Gemm of rows, between two Reshapes if there are more axes."""
    found = None if product.outputs[0].is_graph_output() else _bias_after(product)
    last = product if found is None else found[0]
    biases = () if found is None else found[1:]
    builder = NodeBuilder(f"{last.outputs[0].name}.rows", last)
    assert x.shape is not None
    *leading, inputs = x.shape
    is_flat = len(leading) == 1
    rows = x
    if not is_flat:
        assert isinstance(inputs, int)
        rows = builder.add("Reshape", x, builder.indices("flat", [-1, inputs]))
    total = builder.add("Gemm", rows, weight, *biases, node_name=product.name, transB=1)
    if not is_flat:
        total = builder.add("Reshape", total, _shape(builder, x, weight))
    replace_node(last, total)
    if last is not product:
        remove_node(product)


def _shape(builder: NodeBuilder, x: ir.Value, weight: ir.Value) -> ir.Value:
    """Return the shape of a product with `x`, as a constant if at most one size is open."""
    assert x.shape is not None and weight.shape is not None
    outputs = weight.shape[0]
    assert isinstance(outputs, int)
    leading = [size if isinstance(size, int) else -1 for size in x.shape[:-1]]
    if leading.count(-1) <= 1:
        return builder.indices("shape", [*leading, outputs])
    open_sizes = builder.add("Shape", x, start=0, end=len(leading))
    last = builder.indices("outputs", [outputs])
    return builder.add("Concat", open_sizes, last, axis=0)


# The operators with a bias, and the axis of the weight that outputs lie along.
_OUTPUT_AXES = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}


def write_sum_biases(model: ir.Model, lowering: Lowering) -> None:
    """Replace float biases by codes. torch.onnx has dropped biases of zeros."""
    for node in nodes_of(model.graph, *_OUTPUT_AXES):
        name = node.name or ""
        if len(node.inputs) == 3 and name in lowering.biases:
            bias = lowering.biases[name]
            builder = NodeBuilder(f"{name}.bias", node)
            codes = builder.constant("codes", bias.codes, ir.DataType.INT32)
            scale = builder.constant("scale", bias.step)
            # Without it, AIMET takes the type of the codes for uint8
            zero_points = torch.zeros_like(bias.step)
            zero_point = builder.constant("zero_point", zero_points, ir.DataType.INT32)
            value = builder.add("DequantizeLinear", codes, scale, zero_point, axis=0)
            node.replace_input_with(2, value)


def hide_float_biases(model: ir.Model, lowering: Lowering) -> None:
    """Add computed zeros to the biases of `float_layers`, and of layers with float weights."""
    for node in nodes_of(model.graph, *_OUTPUT_AXES):
        has_bias = len(node.inputs) == 3
        count = _channels_of_float_weight(node)
        if count is None and has_bias and node.name in lowering.float_layers:
            count = _sizes(node.inputs[2])[0]
        if count is None:
            continue
        builder = NodeBuilder(f"{node.name}.bias", node)
        codes = builder.constant("zeros", torch.zeros(count), ir.DataType.INT32)
        one = builder.constant("one", 1.0)
        zero_point = builder.constant("zeros_zero_point", 0, ir.DataType.INT32)
        zeros = builder.add("DequantizeLinear", codes, one, zero_point)
        bias = zeros
        if has_bias:
            bias = builder.add("Add", node.inputs[2], zeros)
        else:
            node.resize_inputs(3)
        node.replace_input_with(2, bias)


def _channels_of_float_weight(node: ir.Node) -> int | None:
    """Return the number of outputs if a node multiplies quantized values by float weights."""
    x, weight = node.inputs[:2]
    if producer_of(x, "DequantizeLinear") is None or weight is None:
        return None
    if not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT:
        return None
    sizes = _sizes(weight)
    if node.attributes.get_int("transB", 0):
        return sizes[0]
    channels = sizes[_OUTPUT_AXES[node.op_type]]
    if node.op_type == "ConvTranspose":
        channels *= node.attributes.get_int("group", 1)
    return channels


def _sizes(value: ir.Value | None) -> list[int]:
    """Return the shape of an initializer."""
    assert value is not None and value.shape is not None
    return [size for size in value.shape if isinstance(size, int)]


def write_sizes_as_sums(model: ir.Model, lowering: Lowering) -> None:
    """Write single sizes as sums if the sum of a convolution and its bias is quantized."""
    if not any(map(_quantizes_sum, nodes_of(model.graph, "Conv", "ConvTranspose"))):
        return
    for node in nodes_of(model.graph, "Shape"):
        axis = _single_axis(node)
        if axis is not None:
            replace_node(node, _as_sum(node, axis))


def _quantizes_sum(node: ir.Node) -> bool:
    """Return whether the output of a convolution with a bias is quantized without an operator
    between.
    """
    if len(node.inputs) != 3:
        return False
    waiting = list(node.outputs)
    while waiting:
        for reader in waiting.pop().consumers():
            if reader.op_type == "QuantizeLinear":
                return True
            if reader.op_type in PASSED_OPERATORS:
                waiting += reader.outputs
    return False


def _single_axis(node: ir.Node) -> int | None:
    """Return the axis whose size a Shape reads; None if it reads several."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    rank = len(source.shape)
    start = node.attributes.get_int("start", 0)
    axes = range(rank)[start : node.attributes.get_int("end", rank)]
    return axes[0] if len(axes) == 1 else None


def _as_sum(node: ir.Node, axis: int) -> ir.Value:
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    builder = NodeBuilder(f"{node.outputs[0].name}.summed", node)
    mask = [0] * len(source.shape)
    mask[axis] = 1
    sizes = builder.add("Shape", source)
    single = builder.add("Mul", sizes, builder.indices("picked", mask))
    along = builder.indices("axis", [0])
    return builder.add("ReduceSum", single, along, keepdims=1)


_SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx writes which operator of the program a node comes from."""
_CALL = "pkg.torch.onnx.fx_node"
"""Where torch.onnx writes the call in the program that a node comes from."""
_PARAMETER = re.compile(r"%p_network_(module_\d+)_")
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
    modules = lowering.network.module_names
    layer_of_module = dict(zip(modules.values(), modules, strict=True))
    counts: Counter[str] = Counter()
    for node in nodes_of(model.graph, *PRODUCTS):
        operator = node.metadata_props.get(_SCOPES, "")
        name = _layer(node, layers, lowering)
        if name is None and operator in layer_of_operator:
            name = layer_of_operator[operator] + INSIDE
        parameter = _PARAMETER.search(node.metadata_props.get(_CALL, ""))
        if name is None and parameter is not None:
            # Gates in another order are other constants than the layer's weights
            name = layer_of_module.get(parameter[1])
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
