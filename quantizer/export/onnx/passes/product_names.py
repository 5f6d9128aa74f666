"""Names nodes that multiply after their layers, so that kernels can be reported by layer."""

from collections import Counter

import onnx_ir as ir

from quantizer.export.onnx.builder import producer_of
from quantizer.export.onnx.marks import MULTIPLYING, NUMBERED, Lowering, marks_of


def name_products(
    model: ir.Model,
    lowering: Lowering,
) -> None:
    """Name each node that multiplies; a layer's further products get a number."""
    layers = _layers(model, lowering)
    counts: Counter[str] = Counter()
    for node in model.graph:
        layer = _layer(node, layers, lowering) if node.op_type in MULTIPLYING else None
        if layer is not None:
            counts[layer] += 1
            node.name = layer
            if counts[layer] > 1:
                node.name = f"{layer}{NUMBERED}{counts[layer]}"


def _layers(
    model: ir.Model,
    lowering: Lowering,
) -> dict[ir.Value, str]:
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
    return layers


def _layer(
    node: ir.Node,
    layers: dict[ir.Value, str],
    lowering: Lowering,
) -> str | None:
    """Return the layer whose weight a node multiplies by.

    For a product of activations, return the layer that quantizes it.
    """
    weight = node.inputs[1]
    while weight is not None and weight not in layers:
        transpose = producer_of(weight, "Transpose")
        if transpose is None:
            break
        weight = transpose.inputs[0]
    if weight is not None and weight in layers:
        is_weight = weight.producer() is None or lowering.weight_of(weight) is not None
        if is_weight:
            return layers[weight]
    return layers.get(node.outputs[0])
