"""Operators that move values and compute nothing: where an axis of their input is in their output."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from quantizer.graph.ir import Graph, Node, Ref

Shape = tuple[int | None, ...]
Rule = Callable[[Node, Shape, Shape, int], "int | None"]


def moved(graph: Graph, node: Node, axis: int) -> int | None:
    """The output's axis that holds axis `axis` of the node's first input, whole and in order; None where none does."""
    rule, source = _RULES.get(node.op), input_of(graph, node)
    if rule is None or source is None or source.shape is None or node.shape is None:
        return None
    found = rule(node, source.shape, node.shape, axis)
    same = found is not None and 0 <= found < len(node.shape) and node.shape[found] == source.shape[axis]
    return found if same else None


def moved_back(graph: Graph, node: Node, axis: int) -> int | None:
    """The axis of the first input that `moved` takes to the output's `axis`."""
    source = input_of(graph, node)
    axes = range(len(source.shape)) if source is not None and source.shape is not None else ()
    return next((before for before in axes if moved(graph, node, before) == axis), None)


def is_move(node: Node) -> bool:
    """Whether the operator has a rule here."""
    return node.op in _RULES


def input_of(graph: Graph, node: Node) -> Node | None:
    """The node whose values move: the first argument."""
    first = next(iter(node.inputs.values()), None)
    return graph.by_name[first.name] if isinstance(first, Ref) else None


def _same(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    return axis


def _reshaped(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    """Rows stay rows: the axis is the one of the same size with as many values behind it."""
    behind = _count(before[axis + 1 :])
    matches = (at for at, size in enumerate(after) if size == before[axis] and _count(after[at + 1 :]) == behind)
    return None if behind is None else next(matches, None)


def _count(sizes: Shape) -> int | None:
    known = [size for size in sizes if size is not None]
    return prod(known) if len(known) == len(sizes) else None


def _transposed(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    first, second = (int(node.attrs.get(key, default)) % len(before) for key, default in (("dim0", 0), ("dim1", 1)))
    return {first: second, second: first}.get(axis, axis)


def _permuted(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    return [dim % len(before) for dim in node.attrs["dims"]].index(axis)


def _expanded(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    return axis + len(after) - len(before)


def _cut(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    """Sizes of the axis are compared by `moved`: a slice that keeps all of it keeps its order."""
    return axis if node.attrs.get("step", 1) == 1 else None


def _selected(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    dim = int(node.attrs["dim"]) % len(before)
    return None if dim == axis else axis - (dim < axis)


def _picked(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    dim = int(node.attrs["dim"]) % len(before)
    return None if dim == axis else axis


def _indexed(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    """`x[rows]`, `x[rows, columns]`: the last axis stays the last."""
    indices = {**node.attrs, **node.inputs}["indices"]
    return len(after) - 1 if axis == len(before) - 1 and len(indices) <= axis else None


def _rolled(node: Node, before: Shape, after: Shape, axis: int) -> int | None:
    dims = [dim % len(before) for dim in node.attrs.get("dims") or [axis]]
    return None if axis in dims else axis


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("to", "contiguous", "clone", "alias", "type_as", "detach"), _same),
    **dict.fromkeys(("reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    "transpose": _transposed,
    "permute": _permuted,
    "expand": _expanded,
    "slice": _cut,
    "select": _selected,
    "index_select": _picked,
    "index": _indexed,
    "roll": _rolled,
}
