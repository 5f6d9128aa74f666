"""Writes linear layers as Gemm, which has an operand for the bias and takes two dimensions."""

from dataclasses import dataclass

import onnx_ir as ir

from quantizer.export.onnx.builder import NodeBuilder, array_of, remove_node, replace_node
from quantizer.export.onnx.marks import Lowering, marks_of


@dataclass(frozen=True)
class _Product:
    """A MatMul of `x` with a transposed weight, and the Add of a bias after it, if any."""

    node: ir.Node
    x: ir.Value
    add: ir.Node | None
    bias: ir.Value | None

    @property
    def sizes(self) -> list[int | None]:
        """Return the sizes of `x`; None for an open one."""
        assert self.x.shape is not None
        sizes: list[int | None] = []
        for size in self.x.shape:
            known = size if isinstance(size, int) else None
            sizes.append(known)
        return sizes


def write_gemms(model: ir.Model, lowering: Lowering) -> None:
    """Replace MatMul and Add of a marked weight [outputs, inputs] by Gemm."""
    for mark in marks_of(model.graph):
        weight = mark.outputs[0]
        if lowering.weight_of(weight) is None:
            continue
        for transpose in list(weight.consumers()):
            if _swaps_two_axes(transpose):
                _replace_products(transpose, weight)


def _swaps_two_axes(node: ir.Node) -> bool:
    """Return whether a node is the Transpose of a matrix."""
    if node.op_type != "Transpose" or node.outputs[0].is_graph_output():
        return False
    return list(node.attributes.get_ints("perm", ())) == [1, 0]


def _replace_products(transpose: ir.Node, weight: ir.Value) -> None:
    transposed = transpose.outputs[0]
    for node in list(transposed.consumers()):
        x = node.inputs[0]
        is_product = node.op_type == "MatMul" and node.inputs[1] is transposed
        if is_product and x is not None and x.shape is not None:
            add, bias = _bias_after(node)
            _replace_product(_Product(node, x, add, bias), weight)
    if not transposed.uses():
        remove_node(transpose)


def _bias_after(product: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the Add after a product, and its bias; Nones if there is none."""
    result = product.outputs[0]
    readers = result.consumers()
    if len(readers) != 1 or result.is_graph_output():
        return None, None
    add = readers[0]
    if add.op_type != "Add":
        return None, None
    for operand in add.inputs:
        values = array_of(operand)
        if values is not None and values.ndim == 1:
            return add, operand
    return None, None


def _replace_product(product: _Product, weight: ir.Value) -> None:
    """Replace a product by a Gemm of rows, between two Reshapes if there are more axes."""
    last = product.add or product.node
    builder = NodeBuilder(f"{last.outputs[0].name}.rows", last)
    is_flat = len(product.sizes) == 2
    rows = product.x
    if not is_flat:
        inputs = product.sizes[-1]
        assert inputs is not None
        flat = builder.indices("flat", [-1, inputs])
        rows = builder.add("Reshape", rows, flat)
    operands = [rows, weight]
    if product.bias is not None:
        operands.append(product.bias)
    total = builder.add("Gemm", *operands, node_name=product.node.name, transB=1)
    if not is_flat:
        shape = _shape(builder, product, weight)
        total = builder.add("Reshape", total, shape)
    replace_node(last, total)
    if product.add is not None:
        remove_node(product.node)


def _shape(builder: NodeBuilder, product: _Product, weight: ir.Value) -> ir.Value:
    """Return the shape of a product, as a constant if at most one size is open."""
    assert weight.shape is not None
    outputs = weight.shape[0]
    assert isinstance(outputs, int)
    leading = product.sizes[:-1]
    if leading.count(None) <= 1:
        sizes = [-1 if size is None else size for size in leading]
        return builder.indices("shape", [*sizes, outputs])
    open_sizes = builder.add("Shape", product.x, start=0, end=len(leading))
    last = builder.indices("outputs", [outputs])
    return builder.add("Concat", open_sizes, last, axis=0)
