"""Rewrites programs in the form that the compilers of phones take, with the same values."""

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from quantizer.export.programs.qdq import DEQUANTIZE, QUANTIZE

_RESHAPE = torch.ops.aten.reshape.default
_RESHAPES = (torch.ops.aten.flatten.using_ints, torch.ops.aten.view.default, _RESHAPE)
_MEAN = torch.ops.aten.mean.dim
_PADS = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.pad.default)
_CONVOLUTION = torch.ops.aten.conv2d.default
_PADDING_INDEX = 4
"""The argument of a convolution with its padding; the arguments before it have defaults."""
_IMAGE_AXES = ([2, 3], [-2, -1])
_IMAGE_ENDS = 4
"""How many sizes a padding of height and width has: two ends of each axis."""
_DEFAULTS = (None, [1, 1], [0, 0])
_ATEN = torch.ops.aten
ONE_SCALE = (
    _ATEN.cat.default,
    _ATEN.contiguous.default,
    _ATEN.max_pool2d.default,
    _ATEN.permute.default,
    _ATEN.transpose.int,
    _ATEN.slice.Tensor,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    *_RESHAPES,
    _ATEN.relu.default,
    _ATEN.relu_.default,
    _ATEN.hardtanh.default,
    _ATEN.hardtanh_.default,
    _ATEN.clamp.default,
)
"""Operators whose int8 kernels have the same scale and zero point before and after them.

Values may be rounded before or after them: they move values, or keep their order.
"""
_PARTS = (_ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split_with_sizes.default)
"""Operators that cut a value into parts, along an axis that is their last argument, or 0."""
_CONVOLUTIONS_1D = {
    _ATEN.conv1d.default: _CONVOLUTION,
    _ATEN.conv_transpose1d.default: _ATEN.conv_transpose2d.input,
}
"""The same convolutions with two axes."""
_MISHES = (_ATEN.mish.default, _ATEN.mish_.default)
_FACTORS = {_ATEN.softplus.default: 1.0, _ATEN.log_sigmoid.default: -1.0} | dict.fromkeys(
    _MISHES, 1.0
)
"""The factor of the softplus that is in an operator, if its call gives none."""
_LIST_FILLS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
"""The value that a second axis gets, by the argument of a convolution."""


def infer_batches(program: ExportedProgram) -> None:
    """Let each reshape find the batch size itself: XNNPACK refuses sizes that are computed."""
    for target in _RESHAPES:
        for node in program.graph.find_nodes(op="call_function", target=target):
            sizes = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
            if sizes.count(-1) == 1:
                node.target = _RESHAPE
                node.args = (node.args[0], sizes)
                node.kwargs = {}
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def average_images(program: ExportedProgram) -> None:
    """Let each average over height and width keep these axes, and drop them afterwards.

    Only that has int8 kernels. If the average is quantized next, its codes come first.
    """
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=_MEAN):
        value, axes, *others = node.args
        shape = node.meta["val"].shape
        if len(shape) != 2 or sorted(axes) not in _IMAGE_AXES:
            continue
        if any(others) or node.kwargs:
            continue
        readers = list(node.users)
        node.args = (value, axes, True)
        reduced = node.meta["val"]
        node.meta["val"] = reduced[..., None, None]
        last = node
        with graph.inserting_after(node):
            if len(readers) == 1 and readers[0].target is QUANTIZE:
                last = _quantized(node, readers[0])
        with graph.inserting_after(last):
            sizes = [size if isinstance(size, int) else -1 for size in shape]
            dropped = graph.call_function(_RESHAPE, (last, sizes))
        dropped.meta["val"] = reduced
        for reader in readers:
            reader.replace_input_with(node, dropped)
    program.graph_module.recompile()


def _quantized(node: Node, quantize: Node) -> Node:
    """Insert a quantization of a node and its dequantization, with the scale of `quantize`;
    return the latter.
    """
    graph = node.graph
    qparams = quantize.args[1:]
    codes = graph.call_function(QUANTIZE, (node, *qparams))
    codes.meta["val"] = node.meta["val"].to(torch.int8)
    with graph.inserting_after(codes):
        values = graph.call_function(DEQUANTIZE, (codes, *qparams))
    values.meta["val"] = node.meta["val"]
    return values


def fold_padding(program: ExportedProgram) -> None:
    """Let convolutions pad with zeros themselves, where both ends get as many.

    A quantized zero is exact, so the values are the same. LiteRT would transpose images before
    and after each padding, and XNNPACK would pad apart from the convolution.
    """
    for node in program.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        pad = _padding_before(node)
        if pad is None:
            continue
        amounts = _symmetric_amounts(pad)
        if amounts is None:
            continue
        stated = list(node.args)
        for default in _DEFAULTS[len(stated) - 2 :]:
            stated.append(default)
        sums: list[int] = []
        for size, amount in zip(stated[_PADDING_INDEX], amounts, strict=True):
            sums.append(size + amount)
        stated[_PADDING_INDEX] = sums
        node.args = tuple(stated)
        source: Any = pad.args[0]
        pad.replace_all_uses_with(source)
    for node in program.graph.find_nodes(op="call_function", target=QUANTIZE):
        source = node.args[0]
        if source.target is not DEQUANTIZE:
            continue
        if source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _padding_before(node: Node) -> Node | None:
    """Return the padding that only this convolution reads, perhaps as codes."""
    source = node.args[0]
    while isinstance(source, Node) and len(source.users) == 1:
        if source.target in _PADS:
            return source
        if source.target not in (QUANTIZE, DEQUANTIZE):
            return None
        source = source.args[0]
    return None


def _symmetric_amounts(pad: Node) -> list[int] | None:
    """Return how many zeros are added at each end of height and width, if both get as many."""
    arguments: Any = pad.args
    _, sizes, *others = arguments
    is_zero = all(other in ("constant", 0, 0.0, None) for other in others)
    if len(sizes) != _IMAGE_ENDS or pad.kwargs or not is_zero:
        return None
    left, right, top, bottom = sizes
    if left != right or left < 0:
        return None
    if top != bottom or top < 0:
        return None
    return [top, left]


def round_before_moves(program: ExportedProgram) -> None:
    """Round values to the scale after an operator of `ONE_SCALE` before it.

    Engines fail or compute other values where these scales differ.
    """
    graph = program.graph
    for target in ONE_SCALE:
        for node in graph.find_nodes(op="call_function", target=target):
            readers = list(node.users)
            if len(readers) != 1 or readers[0].target is not QUANTIZE:
                continue
            # Sizes of reshapes may be nodes, too.
            inputs = node.all_input_nodes
            values = [value for value in inputs if isinstance(value.meta["val"], Tensor)]
            for value in values:
                source, reader = source_of_codes(value, node)
                is_coded = source.target is DEQUANTIZE
                if is_coded and source.args[1:] == readers[0].args[1:]:
                    continue
                if not is_coded and len(values) == 1:
                    continue
                with graph.inserting_after(source):
                    rounded = _quantized(source, readers[0])
                reader.replace_input_with(source, rounded)
    program.graph_module.recompile()


def source_of_codes(value: Node, reader: Node) -> tuple[Node, Node]:
    """Return where a value comes from before operators of `ONE_SCALE`, and what reads it there.

    Such operators are passed only while nothing else reads what they return.
    """
    while value.target in ONE_SCALE and len(value.all_input_nodes) == len(value.users) == 1:
        reader = value
        (value,) = value.all_input_nodes
    return value, reader


def slice_parts(program: ExportedProgram) -> None:
    """Write the parts of a value as slices. ExecuTorch fixes the batch at a chunk."""
    graph = program.graph
    for target in _PARTS:
        for node in graph.find_nodes(op="call_function", target=target):
            value, _, *axes = node.args
            (axis,) = axes or [0]
            sizes = [part.shape[axis] for part in node.meta["val"]]
            if not all(isinstance(size, int) for size in sizes):
                continue
            for part in list(node.users):
                index = part.args[1]
                start = sum(sizes[:index])
                stop = start + sizes[index]
                part.target = _ATEN.slice.Tensor
                part.args = (value, axis, start, stop)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def write_softplus(program: ExportedProgram) -> None:
    """Write softplus, and what is a function of it, without a choice between two values.

    ExecuTorch's kernel of `where` takes images in another layout than XNNPACK gives.
    """
    graph = program.graph
    for target in _FACTORS:
        for node in graph.find_nodes(op="call_function", target=target):
            value, *settings = node.args
            # Softplus has a factor, and a limit beyond which no float shows the difference
            factor = _FACTORS[target]
            if settings:
                factor = settings[0]
            with graph.inserting_before(node):
                result = _softplus(value, factor)
                if target in _MISHES:
                    result = _called(_ATEN.tanh.default, result)
                    result = _called(_ATEN.mul.Tensor, result, value)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    program.graph_module.recompile()


def _softplus(value: Node, factor: float) -> Node:
    """Insert log(1 + exp(factor * value)) / factor, in which nothing overflows."""
    scaled = _called(_ATEN.mul.Tensor, value, factor)
    size = _called(_ATEN.abs.default, scaled)
    negative = _called(_ATEN.neg.default, size)
    power = _called(_ATEN.exp.default, negative)
    increased = _called(_ATEN.add.Tensor, power, 1.0)
    logarithm = _called(_ATEN.log.default, increased)
    positive = _called(_ATEN.relu.default, scaled)
    total = _called(_ATEN.add.Tensor, positive, logarithm)
    inverse = 1 / factor
    return _called(_ATEN.mul.Tensor, total, inverse)


def _called(target: Any, value: Node, *others: Any) -> Node:
    """Insert a call whose result is like its first argument."""
    result = value.graph.call_function(target, (value, *others))
    result.meta["val"] = value.meta["val"]
    return result


def add_axes(program: ExportedProgram) -> None:
    """Give convolutions with one axis and weights in float a second axis.

    ExecuTorch does so itself, but takes those between quantized values for int8.
    """
    graph = program.graph
    parameters = program.graph_signature.inputs_to_parameters
    reshaped: set[str] = set()
    for target, two_axes in _CONVOLUTIONS_1D.items():
        for node in graph.find_nodes(op="call_function", target=target):
            _, weight, *others = node.args
            name = parameters.get(weight.name)
            if name is None:
                continue
            if name not in reshaped:
                reshaped.add(name)
                weights = program.state_dict[name].detach().unsqueeze(-1)
                program.state_dict[name] = torch.nn.Parameter(weights, requires_grad=False)
                weight.meta["val"] = weight.meta["val"].unsqueeze(-1)
            settings: list[Any] = []
            for argument, setting in zip(target._schema.arguments[2:], others, strict=False):
                if argument.name in _LIST_FILLS:
                    setting = [*setting, _LIST_FILLS[argument.name]]
                settings.append(setting)
            _with_axis(node, two_axes, (weight, *settings))
    program.graph_module.recompile()


def _with_axis(node: Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Replace a convolution by one whose input gets a last axis, which its output loses."""
    graph = node.graph
    value: Any = node.args[0]
    with graph.inserting_before(node):
        image = graph.call_function(_ATEN.unsqueeze.default, (value, -1))
        image.meta["val"] = value.meta["val"].unsqueeze(-1)
        convolved = graph.call_function(target, (image, *arguments))
        convolved.meta["val"] = node.meta["val"].unsqueeze(-1)
        squeezed = graph.call_function(_ATEN.squeeze.dim, (convolved, -1))
        squeezed.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(squeezed)
    graph.erase_node(node)
