"""Of which layers' values a join consists: what is left after later writes, and what a slice of
it holds.

Follows moves and joins on labels that lie where the values do. Knows no config and no scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.axis_rules import JOINED, PADDED, RESHAPED, SAME, LabelledCall, pads_zeros
from quantizer.graph.channel_labels import compressed, meta_values
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.targets import call
from quantizer.storage.deferred_tensor import loaded

NOTHING = 0
"""The label of zeros, which every grid holds, and of memory that nothing was written to."""
CONSTANT = -1
"""The label of other constants."""
_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_FULL = ("full", "full_like", "new_full", "scalar_tensor")
_VALUED = ("input", "parameter", "module_input", "dequant_stub")
"""Structural operators whose values are no constants."""
_UNFOLLOWED = (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError)
"""What torch raises where an operator cannot run on labels."""


@dataclass(frozen=True)
class Origins:
    """What a value is put together from.

    Attributes:
        sources: the nodes that made its parts, in their order of execution.
        constants: whether constants other than zero stand among them.
        axis: the only axis along which one part follows another; None if there are several, or
            it is not known.
        parts: where there is such an axis, the parts along it: their sources, "" for constants,
            and their lengths.
    """

    sources: tuple[str, ...]
    constants: bool = False
    axis: int | None = None
    parts: tuple[tuple[str, int], ...] = ()


def origins_of(graph: Graph) -> dict[str, Origins]:
    """Return the origins of each join, and of each value that is moved out of one."""
    walk = _Walk(graph)
    for node in graph.nodes:
        walk.visit(node)
    return walk.origins


def maker(graph: Graph, name: str) -> str:
    """Return the node that made a moved value; of several results, the one that picks it out of
    them.
    """
    node = graph.by_name[name]
    while node.row.kind == "passthrough":
        source = graph.source(node)
        if source is None or (node.op == "getitem" and source.row.kind != "passthrough"):
            break
        node = source
    return node.name


class _Walk:
    """Takes sets of sources, and where it matters labels, through the nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.origins: dict[str, Origins] = {}
        self.numbers = {node.name: number for number, node in enumerate(graph.nodes, 1)}
        self.names = {number: name for name, number in self.numbers.items()}
        self.labels = _Labels(graph, self.numbers) if _has_parts(graph) else None

    def visit(self, node: Node) -> None:
        """Add the node's origins if it is a join, or moves the values of one."""
        if node.is_join:
            reads = node.joined()
        else:
            source = self.graph.source(node)
            moves = source is not None and source.name in self.origins and node.row.keeps_scale
            if source is None or not moves:
                return
            reads = (source.name,)
        labels = None if self.labels is None else self.labels.of(node)
        if labels is None:
            self.origins[node.name] = self._put_together(node, reads)
            return
        numbers = {int(label) for part in labels for label in torch.unique(part)}
        sources = {self.names[number] for number in numbers if number > NOTHING}
        axis = _axis_of(labels[0]) if len(labels) == 1 else None
        parts: list[tuple[str, int]] = []
        if axis is not None:
            line = labels[0].movedim(axis, 0).reshape(labels[0].shape[axis], -1)[:, 0]
            runs, lengths = torch.unique_consecutive(line, return_counts=True)
            for number, length in zip(runs.tolist(), lengths.tolist(), strict=True):
                parts.append((self.names.get(number, ""), length))
        self.origins[node.name] = Origins(
            self._in_order(sources), CONSTANT in numbers, axis, tuple(parts)
        )

    def _in_order(self, sources: set[str]) -> tuple[str, ...]:
        return tuple(sorted(sources, key=self.numbers.__getitem__))

    def _put_together(self, node: Node, reads: tuple[str, ...]) -> Origins:
        """The origins without labels: all that the node reads may be in what it makes."""
        sources, constants = self._together(node, reads)
        names = self._in_order(sources)
        source = self.graph.source(node)
        known = None if source is None else self.origins.get(source.name)
        if known is not None and (node.row.rectifies or node.row.axes is SAME):
            return Origins(names, constants, known.axis, known.parts)
        axis = self._joining_axis(node, reads)
        if axis is None:
            return Origins(names, constants)
        parts: list[tuple[str, int]] = []
        for name in reads:
            inner = self.origins.get(name)
            if inner is not None and inner.axis != axis:
                return Origins(names, constants)
            length = (self.graph.by_name[name].shape or ())[axis]
            assert length is not None  # as they lie along it
            label = _leaf_label(self.graph, name, self.numbers)
            parts += inner.parts if inner is not None else [(self.names.get(label, ""), length)]
        return Origins(names, constants, axis, tuple(parts))

    def _joining_axis(self, node: Node, reads: tuple[str, ...]) -> int | None:
        """The axis along which what a join reads lies in it one after the other, None if there
        is no such axis.
        """
        if node.row.axes is not JOINED or not node.shape:
            return None
        axis = int(node.attrs.get("dim", 0)) % node.rank
        total = 0
        for name in reads:
            shape = self.graph.by_name[name].shape or ()
            length = shape[axis] if len(shape) == node.rank else None
            if length is None:
                return None
            total += length
        return axis if total == node.shape[axis] else None

    def _together(self, node: Node, reads: tuple[str, ...]) -> tuple[set[str], bool]:
        """The sources of all that the node reads: any of them may be in what it makes."""
        sources: set[str] = set()
        constants = node.is_join and any(
            _is_constant(node.attrs.get(key)) for key in node.row.joins
        )
        constants = constants or (node.row.axes is PADDED and not pads_zeros(node.attrs))
        for name in reads:
            known = self.origins.get(name)
            if known is not None:
                sources.update(known.sources)
                constants = constants or known.constants
                continue
            label = _leaf_label(self.graph, name, self.numbers)
            constants = constants or label == CONSTANT
            if label > NOTHING:
                sources.add(self.names[label])
        return sources, constants


class _Labels:
    """Numbers of sources that lie where their values do; a node whose moves depend on values
    has none.
    """

    def __init__(self, graph: Graph, numbers: Mapping[str, int]) -> None:
        self.graph, self.numbers = graph, numbers
        self.values = meta_values(graph)
        self.known: dict[str, Any] = {}

    def of(self, node: Node) -> list[Tensor] | None:
        """Return the labels of what a node makes, of each result; None if they are not
        known.
        """
        try:
            labels = self._moved(node)
        except _UNFOLLOWED:
            labels = None
        self.known[node.name] = labels
        if labels is None:
            return None
        return [*labels] if isinstance(labels, (list, tuple)) else [labels]

    def _moved(self, node: Node) -> Any:
        """The labels after the node: as its values are moved."""
        labels = self._read(node)
        if labels is None:
            return None
        first = next(iter(labels.values()))
        if node.row.rectifies or node.row.axes is SAME:
            return first
        if node.row.axes is RESHAPED:
            return first.reshape(self.values[node.name].shape)
        blended = self._blended(node, first)
        if blended is not None:
            return blended
        if not (node.is_join or node.row.only_moves):
            return None  # a maximum or a sorting picks by value
        others = self._others(node)
        if others is not None and node.row.axes is PADDED and not pads_zeros(node.attrs):
            others["value"] = CONSTANT
        return None if others is None else call(node.target, others | labels)

    def _blended(self, node: Node, labels: Tensor) -> Any:
        """The labels after windows, resizing or zeros around, where they are alike along the
        axes that these are on.
        """
        rule, made = node.row.axes, self.values.get(node.name)
        if rule is None or rule.runs or made is None or not isinstance(labels, Tensor):
            return None
        several = isinstance(made, (list, tuple))
        first = made[0] if several else made
        argument = next(iter(node.inputs))
        blended = rule.labels(
            LabelledCall({argument: compressed(labels)}, node.attrs, first.shape, lambda: None)
        )
        if blended is None or blended.shape != first.shape:
            return None
        return [blended] if several else blended

    def _read(self, node: Node) -> dict[str, Any] | None:
        """Labels of the values that are moved, by argument."""
        keys = node.row.joins if node.is_join else tuple(node.inputs)[:1]
        labels: dict[str, Any] = {}
        for key in keys:
            if key in node.inputs:
                if any(
                    name in self.known and self.known[name] is None
                    for name in references(node.inputs[key])
                ):
                    return None
                labels[key] = map_refs(node.inputs[key], self._label)
            elif key in node.attrs:
                labels[key] = CONSTANT if _is_constant(node.attrs[key]) else NOTHING
        return labels

    def _label(self, name: str) -> Any:
        """The labels of one value: of a join, or one number for all of what another node
        makes.
        """
        if name in self.known:
            return self.known[name]
        number = _leaf_label(self.graph, name, self.numbers)
        return torch.full((), number, dtype=torch.int16).expand(self.values[name].shape)

    def _others(self, node: Node) -> dict[str, Any] | None:
        """The other arguments, None if one of them depends on the network's inputs."""
        moved = node.row.joins if node.is_join else tuple(node.inputs)[:1]
        others = {key: value for key, value in node.attrs.items() if key not in moved}
        for key, value in node.inputs.items():
            if key in moved:
                continue
            constants = map_refs(value, self._constant)
            if any(constant is None for constant in _leaves(constants, value)):
                return None
            others[key] = constants
        return others

    def _constant(self, name: str) -> Any:
        """What a node makes of constants alone, such as indices; None if it reads an input."""
        node = self.graph.by_name[name]
        value = self.values.get(name)
        if isinstance(value, (int, float)):
            return value  # a size
        if node.op == "constant":
            return loaded(self.graph.weight(node)).cpu()
        if node.params or node.op == "input" or not node.row.aten:
            return None
        inputs = {key: map_refs(read, self._constant) for key, read in node.inputs.items()}
        for key, read in node.inputs.items():
            if any(constant is None for constant in _leaves(inputs[key], read)):
                return None
        return call(node.target, {**node.attrs, **inputs})


def _leaves(constants: Any, read: Any) -> Iterator[Any]:
    """What stands in place of the references in a nested argument."""
    if isinstance(read, (list, tuple)):
        for constant, item in zip(constants, read, strict=True):
            yield from _leaves(constant, item)
    elif any(references(read)):
        yield constants


def _axis_of(labels: Tensor) -> int | None:
    """The only axis along which labels change."""
    changing = []
    for axis in range(labels.dim()):
        first = labels.narrow(axis, 0, min(1, labels.shape[axis]))
        if bool((labels != first).any()):
            changing.append(axis)
    return changing[0] if len(changing) == 1 else None


def _leaf_label(graph: Graph, name: str, numbers: Mapping[str, int]) -> int:
    """The label of a value that no join made."""
    node = graph.by_name[maker(graph, name)]
    if node.row.kind != "structural" or node.op in _VALUED:
        return numbers[node.name]
    is_zero = node.op in _ZEROS or (node.op in _FULL and not _is_constant(_fill(node)))
    return NOTHING if is_zero or node.op in _UNWRITTEN else CONSTANT


def _fill(node: Node) -> Any:
    """The number that a full tensor is filled with."""
    return node.attrs.get("fill_value", node.attrs.get("s"))


def _is_constant(number: Any) -> bool:
    """Whether an argument is a number other than zero."""
    return isinstance(number, (int, float)) and number != 0


def _has_parts(graph: Graph) -> bool:
    """Whether positions matter: parts of a join may be overwritten or picked, or are moved
    before they are read.
    """
    after: set[str] = set()
    moved: set[str] = set()
    for node in graph.nodes:
        if node.is_join:
            if node.row.axes is not JOINED:
                return True
            after.add(node.name)
        elif node.row.keeps_scale and not after.isdisjoint(node.refs()):
            after.add(node.name)
            is_moved = node.row.only_moves and node.row.axes is not SAME
            if is_moved or not moved.isdisjoint(node.refs()):
                moved.add(node.name)
            if node.op == "getitem" or _elements(node) < _elements(graph.source(node)):
                return True
        elif (
            node.row.kind in ("mac", "float") or node.row.axes is not None
        ) and not moved.isdisjoint(node.refs()):
            return True
    return False


def _elements(node: Node | None) -> int:
    """The number of values for one sample; 0 if it is not known."""
    if node is None or node.shape is None:
        return 0
    return math.prod(size for size in node.shape if size is not None)
