"""Rewrites programs around what LiteRT's converter and kernels lack, with the same values."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.functional import pad

from quantizer.export.mobile.rewrites import ONE_SCALE, called, calls, change_parameter
from quantizer.export.programs.coded import DEQUANTIZE, QUANTIZE

_ATEN = torch.ops.aten
_SQUARES = (_ATEN.square.default, _ATEN.pow.Tensor_Scalar)
_TRANSPOSED = (_ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input)
_SOFTMAX = (_ATEN.softmax.int, _ATEN._softmax.default)
_SHARES = (*_SOFTMAX, _ATEN.sigmoid.default, _ATEN.sigmoid_.default)
"""Operators with values from 0 to 1."""
_SIGNED_SHARES = (_ATEN.tanh.default, _ATEN.tanh_.default)
"""Operators with values from -1 to 1."""
_LEAKY = (_ATEN.leaky_relu.default, _ATEN.leaky_relu_.default)
_JOINS = (_ATEN.cat.default, _ATEN.stack.default)
_INEXACT_IN_LITERT = (
    *_JOINS,
    _ATEN.maximum.default,
    _ATEN.minimum.default,
    _ATEN.avg_pool2d.default,
    _ATEN.adaptive_avg_pool2d.default,
    _ATEN.upsample_bilinear2d.vec,
    _ATEN.upsample_bicubic2d.vec,
    *_LEAKY,
)
"""Operators whose int8 kernels in LiteRT lose accuracy.

Most have one scale and zero point for all values that they read and make. That of leaky ReLU
multiplies by factors of 8 bits.
"""
_LAYERS = ("linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")
_PRODUCTS = ("add", "sub", "rsub", "mul", "div", "mm", "bmm", "matmul", "einsum")
"""The converter rounds the first or the second operand of these, in place or not, and the
weights of layers to 8 bits, if they are constants in float.
"""
_CHOOSING = (
    "where",
    "masked_fill",
    "threshold",
    "elu",
    "celu",
    "mish",
    "softplus",
    "hardshrink",
    "log_sigmoid",
)
"""Operators whose values the converter gives one scale before it chooses among them."""
_PADDING = ("pad", "constant_pad_nd")
_BOUNDS = (-3e38, 3e38)
"""A clamp with these changes no value that codes have."""


def pad_kernels(program: ExportedProgram) -> None:
    """Write the output padding of transposed convolutions as zeros at the end of their kernels.

    The converter refuses output padding.
    """
    padded: set[str] = set()
    for node in calls(program, *_TRANSPOSED):
        settings = _settings(node)
        weight = settings["weight"]
        amounts = settings["output_padding"]
        name = program.graph_signature.inputs_to_parameters.get(weight.name)
        if name is None or _is_dilated(settings) or not any(amounts):
            continue
        # `pad` takes the sizes before and after each axis, from the last axis on
        sizes: list[int] = []
        for amount in reversed(amounts):
            sizes += [0, amount]
        if name not in padded:
            padded.add(name)
            change_parameter(program, weight, partial(pad, pad=sizes))
        settings["output_padding"] = [0] * len(amounts)
        node.args = tuple(settings.values())


def cut_padding(program: ExportedProgram) -> None:
    """Write the padding of transposed convolutions as slices of their results.

    The converter takes a padding only if the result has as many strides as the input has
    values.
    """
    for node in calls(program, *_TRANSPOSED):
        settings = _settings(node)
        padding = settings["padding"]
        pairs = zip(settings["stride"], padding, strict=True)
        sums = [step + 2 * cut for step, cut in pairs]
        # The result has as many strides as the input has values if kernel = stride + 2 padding
        is_taken = [*settings["weight"].meta["val"].shape[2:]] == sums
        is_taken &= not _is_dilated(settings)
        if is_taken or not any(padding):
            continue
        settings["padding"] = [0] * len(padding)
        node.args = tuple(settings.values())
        readers = list(node.users)
        last = node
        for axis, cut in enumerate(padding, start=2):
            stop = cut + node.meta["val"].shape[axis]
            with node.graph.inserting_after(last):
                last = called(_ATEN.slice.Tensor, last, axis, cut, stop)
        for reader in readers:
            reader.replace_input_with(node, last)


def _is_dilated(settings: Mapping[str, Any]) -> bool:
    """Return whether the kernel of a convolution has gaps."""
    return any(size != 1 for size in settings["dilation"])


def _settings(node: Node) -> dict[str, Any]:
    """Return a convolution's arguments by name; lists have one item for each spatial axis."""
    axes = node.meta["val"].dim() - 2
    target: Any = node.target
    arguments = target._schema.arguments
    settings = {argument.name: argument.default_value for argument in arguments}
    for argument, value in zip(arguments, node.args, strict=False):
        settings[argument.name] = value
    for name, value in settings.items():
        if isinstance(value, list | tuple) and len(value) == 1:
            settings[name] = [*value] * axes
    return settings


def multiply_squares(program: ExportedProgram) -> None:
    """Write squares as products; the converter refuses some powers."""
    for node in calls(program, *_SQUARES):
        value, *exponents = node.args
        if exponents in ([], [2], [2.0]):
            node.target = _ATEN.mul.Tensor
            node.args = (value, value)


def keep_scales_of_shares(program: ExportedProgram) -> None:
    """Keep softmax, sigmoid and tanh in float, with the scale of the calibration after them.

    LiteRT's int8 kernels of these have one scale, 1/256 or 1/128, and fail with another. A
    clamp that changes no value keeps the converter from using them.
    """
    for node in calls(program, *_SHARES):
        if node.target in _SOFTMAX:
            # The converter would round the maximum, and no longer find a softmax.
            _hide(node.all_input_nodes[0], node)
        _clamp_before_codes(node, _ATEN.relu.default, ())
    for node in calls(program, *_SIGNED_SHARES):
        _clamp_before_codes(node, _ATEN.hardtanh.default, (-1.0, 1.0))


def keep_scales_of_joins(program: ExportedProgram) -> None:
    """Join and interpolate in float, unless all values before and after have the same codes.

    The converter would round all values to the scale of one of them, and clip those beyond its
    range. Products with 2 before and 0.5 after the operator change no value, and keep the
    converter from using its int8 kernel.
    """
    graph = program.graph
    for node in calls(program, *_INEXACT_IN_LITERT):
        values = node.all_input_nodes
        codes = {_codes_of(value) for value in values}
        after = {_codes_if(reader, QUANTIZE) for reader in node.users}
        is_join = node.target is _ATEN.cat.default
        is_coded_after = len(after) == 1 and None not in after
        if codes == {None} and node.target in _LEAKY:
            # It reads floats, for which it has no int8 kernel.
            continue
        if len(values) == 1:
            codes |= after
        elif is_join and is_coded_after and None not in codes:
            continue
        if len(codes) == 1:
            continue
        for value in values:
            with graph.inserting_before(node):
                doubled = _times(value, 2.0)
                node.replace_input_with(value, doubled)
        with graph.inserting_after(node):
            halved = _times(node, 0.5)
        node.replace_all_uses_with(halved)
        halved.args = (node, 0.5)


def keep_constants(program: ExportedProgram, coded: Collection[str]) -> None:
    """Compute in float what has constants of several values, or chooses among values.

    The converter would round constants to 8 bits with a scale of its own, weights that the
    config leaves in float among them. Products with 2 and 0.5 keep it from that.

    Args:
        coded: the parameters that int8 kernels multiply by, though they are in float here.
    """
    constants = _constants(program, coded)
    for node in list(program.graph.nodes):
        name = _name_of(node)
        values = node.all_input_nodes[:2]
        has_codes = any(_codes_of(value) is not None for value in values)
        gives_codes = any(map(_leads_to_codes, node.users))
        is_layer = name in _LAYERS
        is_choosing = name in _CHOOSING and (has_codes or gives_codes)
        rounds_constants = name in _PRODUCTS or (is_layer and has_codes and gives_codes)
        is_rounding = rounds_constants and not constants.isdisjoint(values)
        if is_choosing or is_rounding:
            for value in values:
                if value not in constants:
                    _hide(value, node, is_layer=is_layer)
        if is_choosing or _pads_with_values(name, node):
            for reader in list(node.users):
                _hide(node, reader)


def _name_of(node: Node) -> str:
    """Return the name of an operator, in place or not; empty if it is none of torch."""
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__).removesuffix("_")


def _pads_with_values(name: str, node: Node) -> bool:
    """Return whether an operator pads with something else than zeros."""
    fills = [fill for fill in node.args[2:] if not isinstance(fill, str)]
    return name in _PADDING and any(fills)


def _leads_to_codes(reader: Node) -> bool:
    """Return whether what reads a value quantizes it, perhaps after it was moved."""
    if reader.target in ONE_SCALE:
        return any(map(_leads_to_codes, reader.users))
    return reader.target is QUANTIZE


def _constants(program: ExportedProgram, coded: Collection[str]) -> set[Node]:
    """Return the float tensors of several values that follow from no input and no codes."""
    signature = program.graph_signature
    parameters = signature.inputs_to_parameters
    fixed: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_fixed = node.name not in signature.user_inputs
            is_fixed &= parameters.get(node.name) not in coded
        else:
            sources = node.all_input_nodes
            is_fixed = node.op == "call_function" and fixed.issuperset(sources)
        # Sizes are fixed in a file for LiteRT.
        is_fixed |= isinstance(node.meta.get("val"), int | torch.SymInt)
        namespace = getattr(node.target, "namespace", "")
        if is_fixed and namespace != DEQUANTIZE.namespace:
            fixed.add(node)
    return {node for node in fixed if _is_float(node) and node.meta["val"].numel() != 1}


def _is_float(node: Node) -> bool:
    """Return whether a node makes one tensor of floats."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def _hide(value: Node, reader: Node, *, is_layer: bool = False) -> None:
    """Keep the converter from joining a value and what reads it to one int8 operator.

    Args:
        is_layer: whether factors would disappear in the weights of the reader.
    """
    if not _is_float(value):
        return
    with value.graph.inserting_before(reader):
        hidden = _times(value, 2.0)
        if is_layer:
            hidden = called(_ATEN.hardtanh.default, hidden, *_BOUNDS)
        hidden = _times(hidden, 0.5)
    reader.replace_input_with(value, hidden)


def _codes_if(node: Node, target: Any) -> Any:
    """Return scale, zero point and codes of a call of an operator; None for other nodes."""
    return node.args[1:] if node.target is target else None


def _codes_of(value: Node) -> Any:
    """Return scale, zero point and codes of a value that was decoded and then at most moved, or
    joined with others of the same codes; None for other values.
    """
    while value.target in ONE_SCALE and len(value.all_input_nodes) == 1:
        (value,) = value.all_input_nodes
    if value.target in _JOINS:
        codes = {_codes_of(part) for part in value.all_input_nodes}
        return codes.pop() if len(codes) == 1 else None
    return _codes_if(value, DEQUANTIZE)


def _times(value: Node, factor: float) -> Node:
    """Insert the product of a value and a number."""
    return called(_ATEN.mul.Tensor, value, factor)


def _clamp_before_codes(node: Node, clamp: Any, bounds: tuple[float, ...]) -> None:
    """Insert a clamp between a value and its quantization."""
    for reader in list(node.users):
        if reader.target is QUANTIZE:
            with node.graph.inserting_before(reader):
                clamped = called(clamp, node, *bounds)
            reader.replace_input_with(node, clamped)
