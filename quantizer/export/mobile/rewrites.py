"""Rewrites programs in the form that the compilers of phones take, with the same values."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from quantizer.export.programs.coded import DEQUANTIZE, QUANTIZE

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
_PARTS = (
    _ATEN.chunk.default,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.unsafe_chunk.default,
    _ATEN.unsafe_split.Tensor,
    _ATEN.unsafe_split_with_sizes.default,
)
"""Operators that cut a value into parts, along an axis that is their last argument, or 0."""
_GATED = (_ATEN.gru.input, _ATEN.gru_cell.default, _ATEN.lstm_cell.default)
"""Recurrent operators that cut the sums of their gates into parts."""
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


def rewrite(
    program: ExportedProgram, rewrites: Iterable[Callable[[ExportedProgram], None]]
) -> None:
    """Change a program by each of some functions."""
    for change in rewrites:
        change(program)
    program.graph_module.recompile()


def calls(program: ExportedProgram, *targets: Any) -> list[Any]:
    """Return the nodes that call one of some operators. Their arguments may be of any type."""
    found = (program.graph.find_nodes(op="call_function", target=each) for each in targets)
    return [*chain.from_iterable(found)]


def called(target: Any, value: Node, *others: Any) -> Node:
    """Insert a call whose result is like its first argument."""
    result = value.graph.call_function(target, (value, *others))
    result.meta["val"] = value.meta["val"]
    return result


def _sizes_of(value: Tensor) -> list[int]:
    """Return the sizes of a value, with -1 for those that are open."""
    return [size if isinstance(size, int) else -1 for size in value.shape]


def infer_batches(program: ExportedProgram) -> None:
    """Let each reshape find the batch size itself: XNNPACK refuses sizes that are computed."""
    for node in calls(program, *_RESHAPES):
        sizes = _sizes_of(node.meta["val"])
        if sizes.count(-1) == 1:
            node.target = _RESHAPE
            node.args = (node.args[0], sizes)
            node.kwargs = {}
    program.graph.eliminate_dead_code()


def average_images(program: ExportedProgram) -> None:
    """Let each average over height and width keep these axes, and drop them afterwards.

    Only that has int8 kernels. If the average is quantized next, its codes come first.
    """
    graph = program.graph
    for node in calls(program, _MEAN):
        value, axes, *others = node.args
        reduced = node.meta["val"]
        is_of_image = reduced.dim() == 2 and sorted(axes) in _IMAGE_AXES
        if not is_of_image or any(others) or node.kwargs:
            continue
        readers = list(node.users)
        node.args = (value, axes, True)
        node.meta["val"] = reduced[..., None, None]
        last = node
        if len(readers) == 1 and readers[0].target is QUANTIZE:
            last = _quantized(node, readers[0])
        with graph.inserting_after(last):
            dropped = called(_RESHAPE, last, _sizes_of(reduced))
        dropped.meta["val"] = reduced
        for reader in readers:
            reader.replace_input_with(node, dropped)


def _quantized(node: Node, quantize: Node) -> Node:
    """Insert a quantization of a node and its dequantization, with the scale of `quantize`;
    return the latter.
    """
    qparams = quantize.args[1:]
    with node.graph.inserting_after(node):
        codes = called(QUANTIZE, node, *qparams)
    codes.meta["val"] = node.meta["val"].to(torch.int8)
    with node.graph.inserting_after(codes):
        values = called(DEQUANTIZE, codes, *qparams)
    values.meta["val"] = node.meta["val"]
    return values


def fold_padding(program: ExportedProgram) -> None:
    """Let convolutions pad with zeros themselves, where both ends get as many.

    A quantized zero is exact, so the values are the same. LiteRT would transpose images before
    and after each padding, and XNNPACK would pad apart from the convolution.
    """
    for node in calls(program, _CONVOLUTION):
        pad = _padding_before(node)
        if pad is None:
            continue
        amounts = _symmetric_amounts(pad)
        if amounts is None:
            continue
        stated = [*node.args, *_DEFAULTS[len(node.args) - 2 :]]
        pairs = zip(stated[_PADDING_INDEX], amounts, strict=True)
        stated[_PADDING_INDEX] = [size + amount for size, amount in pairs]
        node.args = tuple(stated)
        source: Any = pad.args[0]
        pad.replace_all_uses_with(source)
    for node in calls(program, QUANTIZE):
        source = node.args[0]
        if source.target is DEQUANTIZE and source.args[1:] == node.args[1:]:
            node.replace_all_uses_with(source.args[0])
    program.graph.eliminate_dead_code()


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
    is_symmetric = left == right and top == bottom and min(left, top) >= 0
    return [top, left] if is_symmetric else None


def round_before_moves(program: ExportedProgram) -> None:
    """Round values to the scale after an operator of `ONE_SCALE` before it.

    Engines fail or compute other values where these scales differ.
    """
    for node in calls(program, *ONE_SCALE):
        readers = list(node.users)
        if len(readers) != 1 or readers[0].target is not QUANTIZE:
            continue
        # Sizes of reshapes may be nodes, too.
        inputs = node.all_input_nodes
        values = [value for value in inputs if isinstance(value.meta["val"], Tensor)]
        for value in values:
            source, reader = _source_of_codes(value, node)
            is_fitting = len(values) == 1
            if source.target is DEQUANTIZE:
                is_fitting = source.args[1:] == readers[0].args[1:]
            if not is_fitting:
                rounded = _quantized(source, readers[0])
                reader.replace_input_with(source, rounded)


def _source_of_codes(value: Node, reader: Node) -> tuple[Node, Node]:
    """Return where a value comes from before operators of `ONE_SCALE`, and what reads it there.

    Such operators are passed only while nothing else reads what they return.
    """
    while value.target in ONE_SCALE and len(value.all_input_nodes) == len(value.users) == 1:
        reader = value
        (value,) = value.all_input_nodes
    return value, reader


def with_gates(program: ExportedProgram) -> ExportedProgram:
    """Return a program with the operators that recurrent ones with gates consist of.

    `slice_parts` then finds their gates.
    """
    if not calls(program, *_GATED):
        return program
    forms = torch.export.default_decompositions()
    lowered: ExportedProgram = program.run_decompositions(
        {target: forms[target] for target in _GATED}
    )
    return lowered


def slice_parts(program: ExportedProgram) -> None:
    """Write the parts of a value as slices. ExecuTorch fixes the batch at a chunk."""
    for node in calls(program, *_PARTS):
        value, _, *axes = node.args
        (axis,) = axes or [0]
        sizes = [part.shape[axis] for part in node.meta["val"]]
        if not all(isinstance(size, int) for size in sizes):
            continue
        for part in list(node.users):
            index = part.args[1]
            start = sum(sizes[:index])
            part.target = _ATEN.slice.Tensor
            part.args = (value, axis, start, start + sizes[index])
    program.graph.eliminate_dead_code()


def write_softplus(program: ExportedProgram) -> None:
    """Write softplus, and what is a function of it, without a choice between two values.

    ExecuTorch's kernel of `where` takes images in another layout than XNNPACK gives.
    """
    graph = program.graph
    for node in calls(program, *_FACTORS):
        value, *settings = node.args
        # Softplus has a factor, and a limit beyond which no float shows the difference
        factor = settings[0] if settings else _FACTORS[node.target]
        with graph.inserting_before(node):
            result = _softplus(value, factor)
            if node.target in _MISHES:
                result = called(_ATEN.tanh.default, result)
                result = called(_ATEN.mul.Tensor, result, value)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _softplus(value: Node, factor: float) -> Node:
    """Insert log(1 + exp(factor * value)) / factor, in which nothing overflows."""
    scaled = called(_ATEN.mul.Tensor, value, factor)
    logarithm = scaled
    for operator in (_ATEN.abs.default, _ATEN.neg.default, _ATEN.exp.default):
        logarithm = called(operator, logarithm)
    logarithm = called(_ATEN.add.Tensor, logarithm, 1.0)
    logarithm = called(_ATEN.log.default, logarithm)
    positive = called(_ATEN.relu.default, scaled)
    total = called(_ATEN.add.Tensor, positive, logarithm)
    return called(_ATEN.mul.Tensor, total, 1 / factor)


def add_axes(program: ExportedProgram) -> None:
    """Give convolutions with one axis and weights in float a second axis.

    ExecuTorch does so itself, but takes those between quantized values for int8.
    """
    reshaped: set[str] = set()
    for node in calls(program, *_CONVOLUTIONS_1D):
        _, weight, *others = node.args
        name = program.graph_signature.inputs_to_parameters.get(weight.name)
        if name is None:
            continue
        if name not in reshaped:
            reshaped.add(name)
            change_parameter(program, weight, lambda values: values.unsqueeze(-1))
        target: Any = node.target
        settings = [
            [*setting, _LIST_FILLS[argument.name]] if argument.name in _LIST_FILLS else setting
            for argument, setting in zip(target._schema.arguments[2:], others, strict=False)
        ]
        _with_axis(node, _CONVOLUTIONS_1D[target], (weight, *settings))


def change_parameter(
    program: ExportedProgram, node: Node, change: Callable[[Tensor], Tensor]
) -> None:
    """Change the values of a parameter that a node of a program stands for."""
    name = program.graph_signature.inputs_to_parameters[node.name]
    values = change(program.state_dict[name].detach())
    program.state_dict[name] = torch.nn.Parameter(values, requires_grad=False)
    node.meta["val"] = change(node.meta["val"])


def _with_axis(node: Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Replace a convolution by one whose input gets a last axis, which its output loses."""
    graph = node.graph
    value: Any = node.args[0]
    with graph.inserting_before(node):
        image = called(_ATEN.unsqueeze.default, value, -1)
        image.meta["val"] = value.meta["val"].unsqueeze(-1)
        convolved = called(target, image, *arguments)
        convolved.meta["val"] = node.meta["val"].unsqueeze(-1)
        squeezed = called(_ATEN.squeeze.dim, convolved, -1)
        squeezed.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(squeezed)
    graph.erase_node(node)
