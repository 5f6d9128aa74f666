"""Writes linear layers as Gemm, which has an operand for the bias and two dimensions."""

import onnx_ir as ir

from quantizer.export.onnx.builder import NodeBuilder, producer_of, remove_node, replace_node
from quantizer.export.onnx.marks import Lowering, marks_of


def write_gemms(model: ir.Model, lowering: Lowering) -> None:
    """Replace MatMul and Add of a marked weight [outputs, inputs] by Gemm."""
    for mark in marks_of(model.graph):
        weight = mark.outputs[0]
        if lowering.weight_of(weight) is None:
            continue
        for transpose in list(weight.consumers()):
            if transpose.op_type == "Transpose" and _swaps_two_axes(transpose):
                _replace_products(transpose, weight)


def _swaps_two_axes(transpose: ir.Node) -> bool:
    is_output = transpose.outputs[0].is_graph_output()
    return list(transpose.attributes.get_ints("perm", ())) == [1, 0] and not is_output


def _replace_products(transpose: ir.Node, weight: ir.Value) -> None:
    transposed = transpose.outputs[0]
    for product in list(transposed.consumers()):
        x = product.inputs[0]
        is_product = product.op_type == "MatMul" and product.inputs[1] is transposed
        if is_product and x is not None and x.shape is not None:
            _replace_product(product, x, weight)
    if not transposed.uses():
        remove_node(transpose)


def _replace_product(product: ir.Node, x: ir.Value, weight: ir.Value) -> None:
    """Replace a MatMul, with the Add of its bias, by a Gemm of rows."""
    add, bias = _bias_after(product)
    last = product if add is None else add
    assert x.shape is not None and weight.shape is not None
    outputs, inputs = weight.shape
    builder = NodeBuilder(f"{last.outputs[0].name}.rows", last)
    rows = x
    is_flat = len(x.shape) == 2
    if not is_flat:
        rows = builder.add("Reshape", x, builder.indices("flat", [-1, int(inputs)]))
    operands = [rows, weight]
    if bias is not None:
        operands.append(bias)
    total = builder.add("Gemm", *operands, node_name=product.name, transB=1)
    if not is_flat:
        total = builder.add("Reshape", total, _shape(builder, x, int(outputs)))
    result = product.outputs[0]
    replace_node(last, total)
    if last is not product and not result.uses():
        remove_node(product)


def _bias_after(product: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the Add after a product, and its bias; Nones if there is none."""
    result = product.outputs[0]
    readers = result.consumers()
    if len(readers) != 1 or readers[0].op_type != "Add" or result.is_graph_output():
        return None, None
    add = readers[0]
    for operand in add.inputs:
        is_vector = operand is not None and operand.is_initializer()
        if is_vector and operand.shape is not None and len(operand.shape) == 1:
            return add, operand
    return None, None


def _shape(builder: NodeBuilder, x: ir.Value, outputs: int) -> ir.Value:
    """Return the shape of `x` with another last size, as a constant if one size is open."""
    assert x.shape is not None
    sizes: list[int] = []
    for size in list(x.shape)[:-1]:
        sizes.append(size if isinstance(size, int) else -1)
    if sizes.count(-1) <= 1:
        return builder.indices("shape", [*sizes, outputs])
    leading = builder.add("Shape", x, start=0, end=len(sizes))
    return builder.add("Concat", leading, builder.indices("outputs", [outputs]), axis=0)
