"""Pairs of layers where a factor on a channel of the first one can be undone in the second. Changes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantizer.graph.ir import Graph, Node, Ref

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Pair:
    """`second` alone reads what `first` makes, by way of `between`; a channel of `first` is `block` of its inputs."""

    first: Node
    second: Node
    between: tuple[Node, ...]
    block: int


def find_pairs(graph: Graph) -> tuple[Pair, ...]:
    """All pairs in execution order; layers whose parameters anyone else uses are in none."""
    uses = Counter(path for node in graph.nodes for path in node.params.values())
    return tuple(
        pair for node in graph.nodes if _is_scalable(node, uses) and (pair := _follow(graph, node, uses)) is not None
    )


def _is_scalable(node: Node, uses: Mapping[str, int]) -> bool:
    """A convolution or linear layer that owns its parameters."""
    mac = node.op == "linear" or node.op.startswith("conv")
    owns = "weight" in node.params and set(node.inputs) == {"input"}
    return mac and owns and node.is_float and all(uses[path] == 1 for path in node.params.values())


def _follow(graph: Graph, first: Node, uses: Mapping[str, int]) -> Pair | None:
    """From a layer through layers that keep its channels apart to the next one with weights."""
    axis, shape, between = _channel_axis(first, first.shape), first.shape, list[Node]()
    channels = shape[axis] if shape is not None and axis is not None else None
    current = first
    while axis is not None and shape is not None and len(graph.consumers[current.name]) == 1:
        reader = graph.by_name.get(graph.consumers[current.name][0])
        if reader is None or next(iter(reader.inputs.values())) != Ref(current.name):
            return None
        if _is_scalable(reader, uses):
            block = (shape[axis] or 0) // (channels or 1)
            fits = axis == _channel_axis(reader, shape) and (block == 1 or reader.attrs.get("groups", 1) == 1)
            return Pair(first, reader, tuple(between), block) if block and fits else None
        move = _MOVES.get(reader.op)
        axis = move(reader, shape, axis) if move else None
        shape = reader.shape or shape
        between.append(reader)
        current = reader
    return None


def _channel_axis(node: Node, shape: Shape | None) -> int | None:
    """Where a layer's channels lie in a value of this shape; unbatched convolutions have one dimension less."""
    if shape is None:
        return None
    return len(shape) - 1 if node.op == "linear" else len(shape) - 1 - int(node.op[-2])


def _same(node: Node, shape: Shape, axis: int) -> int | None:
    return axis


def _spatial(node: Node, shape: Shape, axis: int) -> int | None:
    """Pooling and resizing mix positions; their number is in the operator's name, else it is all but two."""
    dims = int(node.op[-2]) if node.op[-1] == "d" else len(shape) - 2
    return axis if axis < len(shape) - dims else None


def _pad(node: Node, shape: Shape, axis: int) -> int | None:
    """Padding with zeros, or with the channel's own values, scales with the channel."""
    zeros = node.attrs.get("mode", "constant") != "constant" or not node.attrs.get("value")
    padded = node.attrs.get("pad")
    return axis if zeros and padded is not None and axis < len(shape) - len(padded) // 2 else None


def _reshape(node: Node, shape: Shape, axis: int) -> int | None:
    """Row-major: what is before the channels stays, and each channel becomes a run of neighbours."""
    after = node.shape
    if after is None or after[:axis] != shape[:axis] or len(after) <= axis:
        return None
    before_rest, after_rest = shape[axis:], after[axis:]
    if None in before_rest or None in after_rest:
        return None
    same = math.prod(size or 0 for size in before_rest) == math.prod(size or 0 for size in after_rest)
    return axis if same and (after_rest[0] or 0) % (before_rest[0] or 1) == 0 else None


def _permute(node: Node, shape: Shape, axis: int) -> int | None:
    dims: list[int] = node.attrs["dims"]
    return [dim % len(shape) for dim in dims].index(axis)


def _transpose(node: Node, shape: Shape, axis: int) -> int | None:
    one, other = (int(node.attrs.get(key, default)) % len(shape) for key, default in (("dim0", 0), ("dim1", 1)))
    return {one: other, other: one}.get(axis, axis)


def _mean(node: Node, shape: Shape, axis: int) -> int | None:
    dims = [dim % len(shape) for dim in node.attrs.get("dim") or range(len(shape))]
    gone = 0 if node.attrs.get("keepdim") else sum(dim < axis for dim in dims)
    return None if axis in dims else axis - gone


# How an operator moves the channel axis; None where it mixes channels. All are positively homogeneous.
_MOVES: dict[str, Callable[[Node, Shape, int], int | None]] = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "dropout", "contiguous", "clone"), _same),
    **{f"{kind}_pool{dims}d": _spatial for kind in ("max", "avg", "adaptive_avg") for dims in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample_nearest"), _spatial),
    **dict.fromkeys(("flatten", "unflatten", "reshape", "squeeze", "unsqueeze"), _reshape),
    "pad": _pad,
    "permute": _permute,
    "transpose": _transpose,
    "mean": _mean,
}
