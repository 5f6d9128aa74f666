"""Linear layers in the form that ONNX Runtime multiplies fastest: MatMul, weights stored
[inputs, outputs], then Sub.

Works on torch.onnx's translation, where marks still stand for quantizations. Knows no codes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_LINEAR = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}
"""A Gemm's attributes where it is a linear layer."""
Readers = dict[str, list[NodeProto]]


def straighten(model: ModelProto, is_weight: Callable[[NodeProto], bool]) -> set[str]:
    """Rewrite every product with a marked weight alone; returns the values that now are its
    weight transposed.

    A Transpose between codes and MatMul, or a Gemm, would keep ONNX Runtime from its kernels of
    4-bit weights. It makes a Gemm of MatMul and Add by itself, which in turn has no integer
    kernel where the output is not quantized, and otherwise one with a rounded bias; subtracting
    the negated bias is the same in floating point, and is left alone.

    Args:
        is_weight: whether a node is the mark of a weight.
    """
    readers = readers_of(model.graph.node)
    marks = [node.output[0] for node in model.graph.node if is_weight(node)]
    straight = {
        name
        for name in marks
        if readers[name] and all(_transposes(node, name) for node in readers[name])
    }
    replaced: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0] in straight:
            replaced[node.output[0]] = node.input[0]
            continue
        inputs = [replaced.get(name, name) for name in node.input]
        del node.input[:]
        node.input.extend(inputs)
        nodes += (
            _unfolded(node) if node.op_type == "Gemm" and node.input[1] in straight else [node]
        )
    biases = {
        tensor.name: tensor for tensor in model.graph.initializer if len(tensor.dims) == 1
    }
    readers = readers_of(nodes)
    for product in nodes:
        if product.op_type == "MatMul" and product.input[1] in straight:
            _subtract_bias(model, product, readers, biases)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return straight


def readers_of(nodes: Sequence[NodeProto]) -> Readers:
    """The nodes that read each value; none for what is not there."""
    found: Readers = defaultdict(list)
    for node in nodes:
        for name in node.input:
            found[name].append(node)
    return found


def _transposes(node: NodeProto, weight: str) -> bool:
    """Whether a node reads a weight [outputs, inputs] only to multiply by its transpose."""
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if node.op_type == "Gemm":
        return (
            node.input[1] == weight
            and {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0} | attributes == _LINEAR
        )
    return node.op_type == "Transpose" and list(attributes.get("perm", ())) == [1, 0]


def _unfolded(node: NodeProto) -> list[NodeProto]:
    """A Gemm as MatMul, and Add where it has a bias."""
    (result,), (x, weight, *bias) = node.output, node.input
    if not bias:
        return [helper.make_node("MatMul", [x, weight], [result], name=node.name)]
    product = f"{result}.product"
    return [
        helper.make_node("MatMul", [x, weight], [product], name=node.name),
        helper.make_node("Add", [product, *bias], [result], name=f"{node.name}.bias"),
    ]


def _subtract_bias(
    model: ModelProto, product: NodeProto, readers: Readers, biases: dict[str, TensorProto]
) -> None:
    """Make the Add of a bias after a product a Sub of the negated bias."""
    adds = readers[product.output[0]]
    if len(adds) != 1 or adds[0].op_type != "Add":
        return
    (add,) = adds
    bias = next((name for name in add.input if name in biases), None)
    if bias is None:
        return
    negated = f"{bias}.negated"
    if negated not in biases:
        values = np.negative(numpy_helper.to_array(biases[bias]))
        biases[negated] = numpy_helper.from_array(values, negated)
        model.graph.initializer.append(biases[negated])
    add.op_type = "Sub"
    del add.input[:]
    add.input.extend([product.output[0], negated])
