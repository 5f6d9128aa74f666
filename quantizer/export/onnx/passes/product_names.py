"""Names nodes that multiply after their layers, so that kernels can be reported by layer."""

from collections import Counter

import onnx_ir as ir

from quantizer.export.onnx.builder import producer_of
from quantizer.export.onnx.marks import (
    INSIDE,
    MULTIPLYING,
    NUMBERED,
    PRODUCTS,
    RECURRENT,
    Lowering,
    marks_of,
)

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
