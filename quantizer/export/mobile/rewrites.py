"""Rewrites programs in the form that the compilers of phones take, with the same values."""

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from quantizer.export.torch_export.qdq import DEQUANTIZE, QUANTIZE

_RESHAPE = torch.ops.aten.reshape.default
_RESHAPES = (torch.ops.aten.flatten.using_ints, torch.ops.aten.view.default, _RESHAPE)
_MEAN = torch.ops.aten.mean.dim
_PADS = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.pad.default)
_CONVOLUTION = torch.ops.aten.conv2d.default
_PADDING_INDEX = 4
"""The argument of a convolution with its padding; the arguments before it have defaults."""
_IMAGE_AXES = ([2, 3], [-2, -1])
_IMAGE_ENDS = 4
"""The sizes of a padding of height and width."""
_DEFAULTS = (None, [1, 1], [0, 0])


def infer_batches(
    program: ExportedProgram,
) -> None:
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


def average_images(
    program: ExportedProgram,
) -> None:
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


def _quantized(
    node: Node,
    quantize: Node,
) -> Node:
    """Insert the same quantization and dequantization of a value after it."""
    graph = node.graph
    qparams = quantize.args[1:]
    codes = graph.call_function(QUANTIZE, (node, *qparams))
    codes.meta["val"] = node.meta["val"].to(torch.int8)
    with graph.inserting_after(codes):
        values = graph.call_function(DEQUANTIZE, (codes, *qparams))
    values.meta["val"] = node.meta["val"]
    return values


def fold_padding(
    program: ExportedProgram,
) -> None:
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


def _padding_before(
    node: Node,
) -> Node | None:
    """Return the padding that only this convolution reads, perhaps as codes."""
    source = node.args[0]
    while isinstance(source, Node) and len(source.users) == 1:
        if source.target in _PADS:
            return source
        if source.target not in (QUANTIZE, DEQUANTIZE):
            return None
        source = source.args[0]
    return None


def _symmetric_amounts(
    pad: Node,
) -> list[int] | None:
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
