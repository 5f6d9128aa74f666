"""Passes that replace activations that a device lacks or an engine is slow at.

For the DPU, an average pooling becomes the sum of a window times m / 2^s, too. Averages that
the DPU cannot compute stay as they are.
"""

from dataclasses import replace
from typing import Any

from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.targets import pair
from quantizer.numerics.integer import LEAKY_SLOPE, pooling_factor

_Sizes = tuple[int, int]
"""Height and width."""
_Window = tuple[_Sizes, _Sizes, _Sizes]
"""Kernel, stride and padding."""
_GATES = {
    "silu": ("sigmoid", "aten.sigmoid.default"),
    "hardswish": ("hardsigmoid", "aten.hardsigmoid.default"),
}
"""By operator, the operator and the target of its gate."""


def convert_relu6_to_relu(graph: Graph) -> Graph:
    """Convert every ReLU6, module or function, to a ReLU of the same name."""
    return _convert(graph, "relu6", op="relu", target="aten.relu.default")


def convert_silu_to_hswish(graph: Graph) -> Graph:
    """Convert every SiLU, module or function, to a Hardswish of the same name."""
    return _convert(graph, "silu", op="hardswish", target="aten.hardswish.default")


def integer_activations(graph: Graph) -> Graph:
    """Return the graph with activations as engines compute them between codes.

    A LeakyReLU reads codes, and no longer belongs to the layer before it. A SiLU or Hardswish
    `x` is the product of its input and of a gate `x_gate`, which gets codes, too. What the
    network returns stays as it is.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        is_inside = "" not in graph.consumers[node.name]
        if is_inside and node.op == "leaky_relu":
            nodes.append(replace(node, op="apart_leaky_relu"))
        elif is_inside and node.op in _GATES:
            op, target = _GATES[node.op]
            gate = replace(node, name=f"{node.name}_gate", op=op, target=target)
            inputs = {**node.inputs, "other": Ref(gate.name)}
            product = replace(node, op="mul", target="aten.mul.Tensor", inputs=inputs)
            nodes += [gate, product]
        else:
            nodes.append(node)
    return graph.replaced(nodes=tuple(nodes))


def _convert(graph: Graph, old: str, **changes: Any) -> Graph:
    """Return the graph with changes to all nodes of an operator, which lose their constants."""
    changes.setdefault("attrs", {})

    def converted(node: Node) -> Node:
        return replace(node, **changes) if node.op == old else node

    return graph.mapped(converted)


def dpu_leaky_relu(graph: Graph) -> Graph:
    """Give every LeakyReLU the DPU's slope, 26/256."""
    numerator, shift = LEAKY_SLOPE
    slope = numerator / 2**shift
    return _convert(graph, "leaky_relu", attrs={"negative_slope": slope})


def dpu_hard_activations(graph: Graph) -> Graph:
    """Compute hardsigmoid as relu6(x + 3) * 2731 / 2^14, and hardswish as x times that in 8
    bits.
    """
    for op in ("hardsigmoid", "hardswish"):
        graph = _convert(graph, op, target=f"dpu.{op}")
    return graph


def dpu_average_pooling(graph: Graph) -> Graph:
    """Return the graph with every average over one fixed window as a scaled sum.

    Such averages are poolings and means over height and width.
    """
    return graph.mapped(lambda node: _scaled_sum(graph, node))


def _scaled_sum(graph: Graph, node: Node) -> Node:
    if node.target not in _WINDOWS:
        return node
    shape = graph.by_name[next(node.refs())].shape
    if shape is None or len(shape) != 4:
        return node
    height, width = shape[2:]
    if shape[1] is None or height is None or width is None:
        return node
    window = _WINDOWS[node.target](node, (height, width))
    if window is None:
        return node
    kernel, stride, padding = window
    multiplier, shift = pooling_factor(*kernel)
    attrs = {
        "kernel_size": list(kernel),
        "stride": list(stride),
        "padding": list(padding),
        "multiplier": multiplier,
        "shift": shift,
    }
    if node.rank == 2:
        attrs["keepdim"] = False
    return replace(node, target="dpu.avg_pool2d", attrs=attrs)


def _avg_pool2d(node: Node, sizes: _Sizes) -> _Window | None:
    kernel = pair(node.attrs["kernel_size"])
    stride = pair(node.attrs.get("stride") or kernel)
    padding = pair(node.attrs.get("padding") or 0)
    counts_padding = node.attrs.get("count_include_pad", True) or padding == (0, 0)
    if not counts_padding or node.attrs.get("divisor_override") or node.shape is None:
        return None
    # With `ceil_mode` the last window may be smaller
    for axis, size in enumerate(sizes):
        steps = (size + 2 * padding[axis] - kernel[axis]) // stride[axis]
        if node.shape[2 + axis] != steps + 1:
            return None
    return kernel, stride, padding


def _adaptive_avg_pool2d(node: Node, sizes: _Sizes) -> _Window | None:
    wanted = node.attrs.get("output_size")
    if wanted is None or node.shape is None:
        return None
    height, width = pair(wanted)
    # None keeps the size
    height = height or sizes[0]
    width = width or sizes[1]
    if sizes[0] % height or sizes[1] % width:
        return None
    kernel = (sizes[0] // height, sizes[1] // width)
    return kernel, kernel, (0, 0)


def _mean(node: Node, sizes: _Sizes) -> _Window | None:
    dims = node.attrs.get("dim")
    if not isinstance(dims, (list, tuple)) or node.attrs.get("dtype") is not None:
        return None
    is_spatial = sorted(dim % 4 for dim in dims) == [2, 3]
    return (sizes, sizes, (0, 0)) if is_spatial else None


_WINDOWS = {
    "aten.avg_pool2d.default": _avg_pool2d,
    "aten.adaptive_avg_pool2d.default": _adaptive_avg_pool2d,
    "aten.mean.dim": _mean,
}
