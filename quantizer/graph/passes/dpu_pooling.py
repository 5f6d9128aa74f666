"""Average pooling as the DPU computes it: the sum of a window times m / 2^s. Other averages
stay as they are.
"""

import dataclasses
from typing import Any

from quantizer.graph.ir import Graph, Node
from quantizer.graph.targets import pair
from quantizer.numerics.integer import pooling_factor


def dpu_average_pooling(graph: Graph) -> Graph:
    """Every average over one fixed window, by pooling or by a mean over height and width, as a
    scaled sum.
    """
    return graph.mapped(lambda node: _scaled_sum(graph, node))


def _scaled_sum(graph: Graph, node: Node) -> Node:
    find = _WINDOWS.get(node.target)
    source = graph.by_name[next(node.refs())] if find else None
    if (
        find is None
        or source is None
        or source.shape is None
        or len(source.shape) != 4
        or None in source.shape[1:]
    ):
        return node
    height, width = source.shape[2:]
    assert height is not None and width is not None  # only the batch is open
    window = find(node, (height, width))
    if window is None:
        return node
    kernel, stride, padding = window
    multiplier, shift = pooling_factor(*kernel)
    attrs: dict[str, Any] = {
        "kernel_size": list(kernel),
        "stride": list(stride),
        "padding": list(padding),
    }
    attrs |= {"multiplier": multiplier, "shift": shift}
    if node.shape is not None and len(node.shape) == 2:
        attrs["keepdim"] = False
    return dataclasses.replace(node, target="dpu.avg_pool2d", attrs=attrs)


Pair = tuple[int, int]
Window = tuple[Pair, Pair, Pair]  # kernel, stride, padding


def _avg_pool2d(node: Node, size: Pair) -> Window | None:
    kernel = pair(node.attrs["kernel_size"])
    stride = pair(node.attrs.get("stride") or kernel)
    padding = pair(node.attrs.get("padding") or 0)
    counted = node.attrs.get("count_include_pad", True) or padding == (0, 0)
    whole = tuple(
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip(size, kernel, stride, padding, strict=True)
    )
    if (
        not counted
        or node.attrs.get("divisor_override")
        or node.shape is None
        or node.shape[2:] != whole
    ):
        return None
    return kernel, stride, padding


def _adaptive_avg_pool2d(node: Node, size: Pair) -> Window | None:
    wanted = node.attrs.get("output_size")
    if wanted is None or node.shape is None:
        return None
    height, width = (goal or n for goal, n in zip(pair(wanted), size, strict=True))
    if size[0] % height or size[1] % width:
        return None
    kernel = size[0] // height, size[1] // width
    return kernel, kernel, (0, 0)


def _mean(node: Node, size: Pair) -> Window | None:
    over = node.attrs.get("dim")
    whole = isinstance(over, (list, tuple)) and sorted(axis % 4 for axis in over) == [2, 3]
    return (size, size, (0, 0)) if whole and node.attrs.get("dtype") is None else None


_WINDOWS = {
    "aten.avg_pool2d.default": _avg_pool2d,
    "aten.adaptive_avg_pool2d.default": _adaptive_avg_pool2d,
    "aten.mean.dim": _mean,
}
