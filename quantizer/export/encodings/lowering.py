"""Turns a translated network with marks into a float network and encodings by tensor names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantizer.config.roles import is_parameter
from quantizer.export.encodings.document import TensorEncoding, encoded_bits
from quantizer.export.onnx.builder import (
    NodeBuilder,
    add_initializer,
    array_of,
    make_names_unique,
    nodes_of,
    operand,
    redirect,
    remove_node,
)
from quantizer.export.onnx.lowering import MULTIPLYING, Lowering, is_mark, marks_of
from quantizer.graph.names import path_names
from quantizer.nn.quantizer import QuantizedTensor

# Operators whose outputs are values of their first input. A second encoding would change
# nothing, and readers refuse it.
_PICKING = (
    "DepthToSpace",
    "Expand",
    "Flatten",
    "Gather",
    "GatherElements",
    "Identity",
    "MaxPool",
    "GlobalMaxPool",
    "ReduceMax",
    "Reshape",
    "Slice",
    "SpaceToDepth",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
_CUTTING = ("Relu", "Clip")
_FUSED = frozenset(
    {
        ("Add", "Relu"),
        ("Conv", "Clip"),
        ("Conv", "Relu"),
        ("ConvTranspose", "Relu"),
        ("Gemm", "Relu"),
    }
)
_DIMENSIONS_IN_3D = 5
_PREFIX = "network."
_TRANSPOSED = ".transposed"
_Encodings = dict[ir.Value, TensorEncoding]
"""Those of values."""


def lower_to_encodings(
    model: ir.Model, lowering: Lowering
) -> tuple[list[TensorEncoding], list[str]]:
    """Remove all marks and return the encodings, parameters after activations, and the layers
    with quantized weights that no encoding fits. The network has their rounded values all the
    same.

    Tensors with encodings are called after their layers, and initializers after parameters.
    """
    parameters: _Encodings = {}
    unencoded: list[str] = []
    for mark in marks_of(model.graph):
        (layer, role), tensor = lowering.marked(mark)
        if is_parameter(role):
            encodings = _parameter_encodings(mark, tensor)
            parameters |= encodings
            if not encodings:
                unencoded.append(layer)
    activations: _Encodings = {}
    for node in list(model.graph):
        if is_mark(node):
            _place_activation(node, lowering, activations)
    for value, encoding in list(activations.items()):
        if _is_repeated_value(value, encoding, activations):
            del activations[value]
    _quantize_before(model.graph, activations, ("Concat",))
    _quantize_before(model.graph, activations, _CUTTING)
    constants = _clip_bounds(model.graph, activations)
    _rename_initializers(model.graph, lowering)
    make_names_unique(model.graph)
    named = [
        replace(encoding, name=str(value.name))
        for value, encoding in (activations | constants | parameters).items()
    ]
    return named, unencoded


def _parameter_encodings(mark: ir.Node, tensor: QuantizedTensor) -> _Encodings:
    """Remove the mark of a weight and return the encodings of the initializers that are left.

    Transposes are computed, so that operators read initializers.
    """
    weight = operand(mark)
    result = mark.outputs[0]
    encoding = _encoding_of_weight(tensor)
    encodings: _Encodings = {}
    for reader, index in list(result.uses()):
        if reader.op_type != "Transpose" or reader.outputs[0].is_graph_output():
            reader.replace_input_with(index, weight)
            encodings[weight] = encoding
            continue
        moved, axes = _transposed(reader, weight)
        reader.outputs[0].replace_all_uses_with(moved)
        remove_node(reader)
        encodings[moved] = _moved(encoding, axes)
    remove_node(mark)
    # All operators that read a weight must have the axis of its scales
    return {
        value: each
        for value, each in encodings.items()
        if each.axis is None
        or all(reader.op_type in MULTIPLYING for reader in value.consumers())
    }


def _transposed(node: ir.Node, weight: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
    """Return the initializer that a Transpose makes of a weight, and the order of its axes."""
    values = array_of(weight)
    assert values is not None and node.graph is not None
    axes = tuple(node.attributes.get_ints("perm", ())) or tuple(reversed(range(values.ndim)))
    name = f"{weight.name}{_TRANSPOSED}"
    moved = node.graph.initializers.get(name)
    if moved is None:
        array = np.ascontiguousarray(values.transpose(axes))
        moved = add_initializer(node.graph, ir.Tensor(array, name=name))
    return moved, axes


def _moved(encoding: TensorEncoding, axes: tuple[int, ...]) -> TensorEncoding:
    """Return the encoding of a weight with its axes in another order."""
    if encoding.axis is None:
        return encoding
    axis = axes.index(encoding.axis)
    if encoding.block_size is None:
        return replace(encoding, axis=axis)
    scale = encoding.scale.transpose(axes)
    return replace(
        encoding, axis=axis, scale=scale, zero_point=encoding.zero_point.transpose(axes)
    )


def _encoding_of_weight(tensor: QuantizedTensor) -> TensorEncoding:
    """Return the encoding of a weight, without its name."""
    spec = tensor.spec
    scale, zero_point = _arrays(tensor)
    axis = spec.ch_axis
    block_size: int | None = None
    if spec.qscheme == "per_group" and axis is not None:
        scale = np.moveaxis(scale, -1, axis)
        zero_point = np.moveaxis(zero_point, -1, axis)
        block_size = spec.group_size
    is_signed = spec.has_signed_codes
    return TensorEncoding(
        "",
        encoded_bits(spec),
        is_signed,
        scale,
        zero_point,
        axis=axis,
        block_size=block_size,
        is_parameter=True,
    )


def _arrays(tensor: QuantizedTensor) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scale and zero point as the JSON has them."""
    scale = tensor.scale.double().numpy()
    return scale, tensor.zero_point.numpy().astype(np.int64)


def _encoding_of_activation(tensor: QuantizedTensor) -> TensorEncoding:
    """Return the encoding of an activation, without its name.

    Its codes are unsigned, as aimet-onnx writes those of activations.
    """
    spec = tensor.spec
    scale, zero_point = _arrays(tensor)
    if spec.has_signed_codes:
        zero_point = zero_point + (1 << (spec.bit_width - 1))
    return TensorEncoding("", spec.bit_width, False, scale, zero_point)


def _place_activation(mark: ir.Node, lowering: Lowering, activations: _Encodings) -> None:
    """Remove the mark of an activation. The value before it gets the encoding.

    Where others read that value as it is, an Identity gets the encoding.
    """
    (layer, role), tensor = lowering.marked(mark)
    source = operand(mark)
    result = mark.outputs[0]
    encoding = _encoding_of_activation(tensor)
    earlier = activations.get(source)
    is_free = earlier is None and not _has_other_readers(source, encoding, lowering)
    is_repeated = earlier is not None and earlier.has_same_codes(encoding)
    is_bound = source.is_graph_input() or source.is_graph_output()
    needs_copy = is_bound and result.is_graph_output()
    if (is_free or is_repeated) and not needs_copy:
        if result.is_graph_output():
            redirect(result, source)
        else:
            result.replace_all_uses_with(source)
    else:
        name = f"{layer}.{role}.copy"
        source = NodeBuilder(name, mark).add("Identity", source, node_name=name)
        redirect(result, source)
    remove_node(mark)
    activations.setdefault(source, encoding)
    if not source.is_graph_input() and not source.is_graph_output():
        path = path_names(lowering.network.graph)[layer]
        source.name = path if role == "activation" else f"{path}.{role}"


def _quantize_before(
    graph: ir.Graph, activations: _Encodings, operators: Sequence[str]
) -> None:
    """Give values that only one of these operators reads the encoding of what it makes, where
    readers quantize both.

    Codes are the same before and after a concatenation. Rounding is monotone, and zero has a
    code, so they are the same behind Relu and Clip, too.
    """
    for node in nodes_of(graph, *operators):
        encoding = activations.get(node.outputs[0])
        sources = node.inputs[:1] if node.op_type in _CUTTING else node.inputs
        for source in sources:
            if encoding is None or source is None or source in activations:
                continue
            is_read_by_others = len(source.consumers()) > 1 or source.is_graph_output()
            producer = source.producer()
            if producer is None or is_read_by_others or _is_fused(producer, node):
                continue
            activations[source] = encoding


def _is_fused(node: ir.Node, cut: ir.Node) -> bool:
    """Return whether readers take an operator and the Relu or Clip behind it for one.

    Source: aimet-onnx 2.42, the supergroups of its configs. Depthwise and 3-D convolutions are
    in none.
    """
    if (node.op_type, cut.op_type) not in _FUSED:
        return False
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or weight.shape is None or node.op_type == "Add":
        return True
    groups = node.attributes.get_int("group", 1)
    is_depthwise = groups > 1 and weight.shape[1] == 1
    return len(weight.shape) != _DIMENSIONS_IN_3D and not is_depthwise


def _clip_bounds(graph: ir.Graph, activations: _Encodings) -> _Encodings:
    """Return encodings for the bounds of Clip operators before an encoded value.

    aimet-onnx quantizes all inputs of operators, these too. The encodings keep their values.
    """
    bounds: _Encodings = {}
    for node in nodes_of(graph, "Clip"):
        encoding = activations.get(node.outputs[0])
        for value in node.inputs[1:]:
            array = array_of(value)
            if encoding is None or value is None or array is None or not np.isfinite(array):
                continue
            bounds[value] = _exact_encoding(float(array), encoding.bits)
    return bounds


def _exact_encoding(value: float, bits: int) -> TensorEncoding:
    """Return an encoding with a code for exactly this value."""
    middle = 1 << (bits - 1)
    # A power of two divides a float without rounding.
    scale = abs(value) / middle if value else 1.0
    zero_point = middle if value < 0 else 0
    return TensorEncoding("", bits, False, np.array(scale), np.array(zero_point, np.int64))


def _has_other_readers(source: ir.Value, encoding: TensorEncoding, lowering: Lowering) -> bool:
    """Return whether a value is read by anything but marks with the same encoding."""
    if source.is_graph_output():
        return True
    for reader in source.consumers():
        if not is_mark(reader):
            return True
        _, tensor = lowering.marked(reader)
        if not _encoding_of_activation(tensor).has_same_codes(encoding):
            return True
    return False


def _is_repeated_value(
    value: ir.Value, encoding: TensorEncoding, activations: _Encodings
) -> bool:
    """Return whether a value only moves values that have the same encoding already."""
    node = value.producer()
    while node is not None and (node.op_type in _PICKING or _is_nearest(node)):
        source = node.inputs[0]
        if source is None:
            return False
        if source in activations:
            return activations[source].has_same_codes(encoding)
        node = source.producer()
    return False


def _is_nearest(node: ir.Node) -> bool:
    """Return whether a node resizes by copying values."""
    return node.op_type == "Resize" and node.attributes.get_string("mode", "") == "nearest"


def _rename_initializers(graph: ir.Graph, lowering: Lowering) -> None:
    """Call initializers after the parameters of the user's model."""
    network = lowering.network
    # A weight that several layers share has a copy for each of them.
    paths = {}
    for layer, module in network.module_names.items():
        for parameter, path in network.graph.by_name[layer].params.items():
            paths[f"{_PREFIX}{module}.{parameter}"] = path.partition("@")[0]
    for name in list(graph.initializers):
        stem = name.removesuffix(_TRANSPOSED)
        path = paths.get(stem, "")
        new_name = path + name.removeprefix(stem)
        if path and new_name not in graph.initializers:
            value = graph.initializers.pop(name)
            value.name = new_name
            graph.register_initializer(value)
