"""Padding with zeros of values whose codes have a zero point, alone or in an average pool that
counts it.

OpenVINO pads the codes with 0, whatever that stands for. So codes are padded with the zero
point here, which changes no value.
"""

from collections.abc import Iterable, Mapping

import torch
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from quantizer.export.onnx.moves import Constants, Makers, moves, way
from quantizer.export.onnx.nodes import CLIPPED, Emission

_PADDING = ("pads", "count_include_pad")


Sizes = Mapping[str, list[int]]
"""Sizes of values by name, 0 for one that is open."""


def sizes_of(values: Iterable[ValueInfoProto]) -> Sizes:
    """Return the sizes of values along their axes."""
    return {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in values
    }


def padded_apart(
    nodes: list[NodeProto], constants: Constants, sizes: Sizes
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes with codes padded in place of such values, and the initializers that
    these read.

    Args:
        constants: the initializers by name.
        sizes: of what pools read.
    """
    makers = {name: node for node in nodes for name in node.output}
    rewritten: list[NodeProto] = []
    initializers: list[TensorProto] = []
    for node in nodes:
        emission = None
        if node.op_type == "AveragePool":
            emission = _pool(node, makers, constants, sizes)
        elif node.op_type == "Pad":
            emission = _pad(node, makers, constants)
        if emission is None:
            rewritten.append(node)
            continue
        rewritten += emission.nodes
        initializers += emission.initializers
    return rewritten, initializers


def _pool(
    pool: NodeProto, makers: Makers, constants: Constants, sizes: Sizes
) -> Emission | None:
    """Return the nodes in place of a pool; None for one that is read right as it is."""
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in pool.attribute
    }
    pads: list[int] = list(attributes.get("pads", ()))
    if not any(pads) or not attributes.get("count_include_pad", 0):
        return None
    if attributes.get("ceil_mode", 0):
        size = sizes.get(pool.input[0], [0])[2:]
        if not size or not all(size):
            return None  # which windows there are depends on it
        pads = _of_windows(size, pads, attributes["kernel_shape"], attributes["strides"])
    half = len(pads) // 2
    emission = Emission(f"{pool.output[0]}.padded")
    amounts = emission.integers(
        "amounts", torch.tensor([0, 0, *pads[:half], 0, 0, *pads[half:]])
    )
    values = _padded_codes(emission, pool.input[0], [amounts], makers, constants)
    if values is None:
        return None
    others = {name: value for name, value in attributes.items() if name not in _PADDING}
    emission.nodes.append(
        helper.make_node("AveragePool", [values], list(pool.output), name=pool.name, **others)
    )
    return emission


def _pad(pad: NodeProto, makers: Makers, constants: Constants) -> Emission | None:
    """Return the nodes in place of a Pad with zeros; None for another one."""
    if not moves(pad, constants):
        return None
    mode = next(
        (helper.get_attribute_value(each) for each in pad.attribute if each.name == "mode"),
        b"constant",
    )
    if mode != b"constant":
        return None
    emission = Emission(f"{pad.output[0]}.padded")
    axes = pad.input[3:]
    values = _padded_codes(emission, pad.input[0], [pad.input[1], *axes], makers, constants)
    if values is None:
        return None
    emission.nodes[-1].output[0] = pad.output[0]
    return emission


def _padded_codes(
    emission: Emission, source: str, amounts: list[str], makers: Makers, constants: Constants
) -> str | None:
    """Add nodes that pad the codes of a value with its zero point; None if it has no such
    codes.

    Args:
        source: the value.
        amounts: the Pad's inputs on how much, and along which axes if not along all.
    """
    *_, origin = way(source, makers, constants)
    dequantize = makers.get(origin)
    if dequantize is None or not _has_zero_point(dequantize, constants):
        return None
    codes, scale, zero_point = dequantize.input
    if origin != source:
        codes = emission.add("QuantizeLinear", source, scale, zero_point)
    how_much, *axes = amounts
    padded = emission.add("Pad", codes, how_much, zero_point, *axes)
    return emission.add("DequantizeLinear", padded, scale, zero_point)


def _of_windows(
    size: list[int], pads: list[int], kernel: list[int], strides: list[int]
) -> list[int]:
    """Return the padding without the last positions of an axis where these alone would make
    another window.

    A pool that rounds the number of windows up leaves out one that begins in the padding behind
    the values. Where the padding is part of the values it cannot tell.

    >>> _of_windows([7], [1, 1], [2], [2])  # windows at 0, 2, 4, 6 and not at 8
    [1, 0]
    """
    half = len(pads) // 2
    ends: list[int] = []
    for axis in range(half):
        begin, end = pads[axis], pads[half + axis]
        beyond = (size[axis] + begin + end - kernel[axis]) % strides[axis]
        windows = (size[axis] + begin + end - kernel[axis]) // strides[axis] + 1
        is_left_out = windows * strides[axis] >= size[axis] + begin
        ends.append(end - beyond if is_left_out else end)
    return [*pads[:half], *ends]


def _has_zero_point(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether a node dequantizes codes of 8 bits of which another than 0 stands for
    zero.
    """
    if (
        node.op_type != "DequantizeLinear"
        or len(node.input) < 3
        or node.input[2] not in constants
    ):
        return False
    zero_point = constants[node.input[2]]
    return zero_point.data_type in CLIPPED and bool(numpy_helper.to_array(zero_point).any())
