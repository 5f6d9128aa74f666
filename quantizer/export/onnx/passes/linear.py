"""Rewrites linear layers to the form of the profile.

ONNX Runtime multiplies fastest in MatMul with a weight stored as [inputs, outputs], then Sub.

A Transpose between codes and MatMul, or a Gemm, would keep ONNX Runtime from its kernels of
4-bit weights. It fuses MatMul and Add into a Gemm. That has no integer kernel if the output is
not quantized, and otherwise one with a rounded bias. Subtracting the negated bias gives the
same floats and is not fused.
"""

import numpy as np
import onnx_ir as ir

from quantizer.export.onnx.builder import (
    NodeBuilder,
    add_initializer,
    array_of,
    remove_node,
    replace_node,
)
from quantizer.export.onnx.conventions import LinearForm
from quantizer.export.onnx.marks import Lowering, marks_of
from quantizer.export.onnx.passes.gemm import write_gemms

TRANSPOSED_KEY = "transposed"
"""In the metadata of marked weights that are used as [inputs, outputs]."""


def straighten_linear(model: ir.Model, lowering: Lowering) -> None:
    """Rewrite every product with a marked weight."""
    form = lowering.conventions.linear
    if form is LinearForm.GEMM:
        write_gemms(model, lowering)
        return
    for mark in marks_of(model.graph):
        weight = mark.outputs[0]
        if lowering.weight_of(weight) is None or weight.is_graph_output():
            continue
        (layer, _), tensor = lowering.marked(mark)
        if lowering.decodes_ahead(layer, tensor):
            continue
        readers = weight.consumers()
        if readers and all(_only_transposes(reader, weight) for reader in readers):
            weight.meta[TRANSPOSED_KEY] = True
            for reader in readers:
                _use_as_stored(reader, weight)
            if form is LinearForm.ADDED:
                continue
            for product in weight.consumers():
                if product.op_type == "MatMul" and product.inputs[1] is weight:
                    _subtract_bias(model.graph, product)


def _only_transposes(node: ir.Node, weight: ir.Value) -> bool:
    """Return whether a node uses a weight [outputs, inputs] only as its transpose."""
    attributes = node.attributes
    if node.op_type == "Transpose":
        is_output = node.outputs[0].is_graph_output()
        return list(attributes.get_ints("perm", ())) == [1, 0] and not is_output
    if node.op_type != "Gemm" or node.inputs[1] is not weight:
        return False
    is_scaled = attributes.get_float("alpha", 1.0) != 1.0
    is_bias_scaled = attributes.get_float("beta", 1.0) != 1.0
    is_transposed = attributes.get_int("transB", 0) == 1 and not attributes.get_int("transA", 0)
    return is_transposed and not is_scaled and not is_bias_scaled


def _use_as_stored(node: ir.Node, weight: ir.Value) -> None:
    """Remove a Transpose of a weight, or turn a Gemm into MatMul and Add."""
    if node.op_type == "Transpose":
        for reader, index in list(node.outputs[0].uses()):
            reader.replace_input_with(index, weight)
        remove_node(node)
        return
    result = node.outputs[0]
    builder = NodeBuilder(f"{result.name}.product", node)
    total = builder.add("MatMul", node.inputs[0], weight, node_name=node.name)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        total = builder.add("Add", total, node.inputs[2])
    replace_node(node, total)


def _subtract_bias(graph: ir.Graph, product: ir.Node) -> None:
    """Turn the Add of a bias after a product into a Sub of the negated bias."""
    readers = product.outputs[0].consumers()
    if len(readers) != 1 or readers[0].op_type != "Add":
        return
    add = readers[0]
    for bias in add.inputs:
        values = array_of(bias)
        if bias is not None and values is not None and values.ndim == 1:
            break
    else:
        return
    name = f"{bias.name}.negated"
    negated = graph.initializers.get(name)
    if negated is None:
        negated = add_initializer(graph, ir.Tensor(np.negative(values), name=name))
    add.op_type = "Sub"
    add.replace_input_with(0, product.outputs[0])
    add.replace_input_with(1, negated)
