"""Quantized values that are moved on their way to a product: quantized again, to the same
codes, where ONNX Runtime would else multiply floats. Changes no value.
"""

from collections.abc import Iterator, Mapping

from onnx import NodeProto, TensorProto, helper

from quantizer.export.onnx.nodes import Emission

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PASSED = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool")
"""What ONNX Runtime moves a DequantizeLinear past."""
_STOPPING = (
    *(
        "Split",
        "Slice",
        "Gather",
        "GatherElements",
        "Expand",
        "Tile",
        "DepthToSpace",
        "SpaceToDepth",
        "Pad",
        "Resize",
    ),
    *("ReduceMax", "ReduceMin", "GlobalMaxPool"),
)
"""What only moves or picks values, too, but for some forms of Pad and Resize."""
MOVES = (*_PASSED, *_STOPPING)
_JOIN = "Concat"
"""Which moves values that have one scale before it."""
Makers = Mapping[str, NodeProto]
Constants = Mapping[str, TensorProto]


def quantized_again(nodes: list[NodeProto], constants: Constants) -> list[NodeProto]:
    """The nodes, with values quantized again behind each move that a DequantizeLinear does not
    pass before a product.

    So the heads of attention, which are slices of one tensor, are multiplied in integers.

    Args:
        constants: the initializers by name; only scales that are among them are repeated.
    """
    makers = {name: node for node in nodes for name in node.output}
    wanted: dict[str, NodeProto] = {}
    for node in nodes:
        for name in node.input[:2] if node.op_type in _PRODUCTS else ():
            *moved, origin = way(name, makers, constants)
            made = makers.get(origin)
            if (
                made is not None
                and made.op_type == "DequantizeLinear"
                and made.input[0] not in constants
            ):
                stopped = [
                    each for each in moved if makers[each].op_type in (*_STOPPING, _JOIN)
                ]
                wanted |= dict.fromkeys(stopped if made.input[1] in constants else (), made)
    found: list[NodeProto] = []
    for node in nodes:
        found.append(node)
        for index, name in enumerate(node.output):
            if name in wanted:
                node.output[index] = f"{name}.moved"
                again, (_, *grid) = Emission(f"{name}.again"), wanted[name].input
                codes = again.add("QuantizeLinear", node.output[index], *grid)
                again.add("DequantizeLinear", codes, *grid, output=name)
                found += again.nodes
    return found


def way(name: str, makers: Makers, constants: Constants) -> Iterator[str]:
    """Yield the values that a value was before it was moved, itself the first."""
    yield name
    while name in makers:
        node = makers[name]
        if not (moves(node, constants) or _joins_one_grid(node, makers, constants)):
            return
        name = node.input[0]
        yield name


def _joins_one_grid(node: NodeProto, makers: Makers, constants: Constants) -> bool:
    """Whether a node joins values that all have the same scale and zero point, as parts of one
    value have.
    """
    if node.op_type != _JOIN:
        return False
    grids: set[tuple[str, ...]] = set()
    for name in node.input:
        *_, origin = way(name, makers, constants)
        maker = makers.get(origin)
        if maker is None or maker.op_type != "DequantizeLinear":
            return False
        grids.add(tuple(maker.input[1:]))
    return len(grids) == 1


def moves(node: NodeProto, constants: Constants) -> bool:
    """Return whether what a node makes has no other values than its first input, and zero."""
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
    }
    if node.op_type == "Pad":
        filling = (
            constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        )
        is_zero = filling is not None and not any(filling.raw_data)
        return (
            attributes.get("mode", b"constant") != b"constant" or len(node.input) < 3 or is_zero
        )
    if node.op_type == "Resize":
        return bool(attributes.get("mode", b"nearest") == b"nearest")
    return node.op_type in MOVES
