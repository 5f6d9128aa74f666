"""From which layers the values of a join come, after later writes and in slices of the join.
Also where the parts of a join are in values that are computed from it.

Moves and joins are followed on labels that are where the values do, and part numbers through
operators that keep channels apart. This file knows no config and no scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import JOINED, PADDED, RESHAPED, SAME, pads_zeros
from quantizer.graph.channels.labels import (
    UNFOLLOWED,
    along_axis,
    carried,
    changing_axes,
    channels_along,
    compress_labels,
    meta_values,
    run_node,
)
from quantizer.graph.channels.provenance import is_pointwise
from quantizer.graph.edits import maker
from quantizer.graph.ir import Graph, Node, map_refs
from quantizer.graph.targets import call
from quantizer.storage.deferred_tensor import loaded

_ZERO = 0
"""The label of zeros, which every scale represents, and of memory that nothing has written."""
_CONSTANT = -1
"""The label of other constants."""
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_FULL = ("full", "full_like", "new_full", "scalar_tensor")


@dataclass(frozen=True)
class Origins:
    """The sources of a value.

    Attributes:
        sources: the nodes that made its parts, in their order of execution.
        constants: whether constants other than zero are among them.
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
    walk = _OriginWalk(graph)
    for node in graph.nodes:
        walk.visit(node)
    return walk.origins


class _OriginWalk:
    """Collects origins through the nodes in order, with labels where positions matter."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.origins: dict[str, Origins] = {}
        self.labels = _SourceLabels(graph) if _has_parts(graph) else None

    def visit(self, node: Node) -> None:
        """Add the node's origins if it is a join, or moves the values of one."""
        reads = node.joined()
        if not node.is_join:
            source = self.graph.source(node)
            if source is None or source.name not in self.origins or not node.row.keeps_scale:
                return
            reads = (source.name,)
        labels = None if self.labels is None else self.labels.of(node)
        if labels is None:
            self.origins[node.name] = self._without_labels(node, reads)
        else:
            self.origins[node.name] = self._from_labels(labels)

    def _from_labels(self, labels: list[Tensor]) -> Origins:
        numbers: set[int] = set()
        for result in labels:
            numbers.update(int(number) for number in torch.unique(result))
        axes = changing_axes(compress_labels(labels[0])) if len(labels) == 1 else []
        constants = _CONSTANT in numbers
        sources = tuple(self._name(number) for number in sorted(numbers) if number > _ZERO)
        if len(axes) != 1:
            return Origins(sources, constants)
        axis = axes[0]
        lines = labels[0].movedim(axis, 0).reshape(labels[0].shape[axis], -1)
        runs, lengths = torch.unique_consecutive(lines[:, 0], return_counts=True)
        parts: list[tuple[str, int]] = []
        for number, length in zip(runs.tolist(), lengths.tolist(), strict=True):
            parts.append((self._name(number), length))
        return Origins(sources, constants, axis, tuple(parts))

    def _name(self, label: int) -> str:
        """Return the node that a label stands for, "" for constants."""
        return self.graph.nodes[label - 1].name if label > _ZERO else ""

    def _without_labels(self, node: Node, reads: tuple[str, ...]) -> Origins:
        """Return the origins of a node that may contain values of all that it reads."""
        labels: set[int] = set()
        for name in reads:
            if name in self.origins:
                sources = self.origins[name].sources
                labels.update(1 + self.graph.index[source] for source in sources)
                if self.origins[name].constants:
                    labels.add(_CONSTANT)
            else:
                labels.add(_leaf_label(self.graph, name))
        fills = [node.attrs.get(key) for key in node.row.joins] if node.is_join else []
        pads = node.row.axes is PADDED and not pads_zeros(node.attrs)
        constants = _CONSTANT in labels or pads or any(map(_is_nonzero, fills))
        names = tuple(self._name(label) for label in sorted(labels) if label > _ZERO)
        source = self.graph.source(node)
        known = None if source is None else self.origins.get(source.name)
        if known is not None and (node.row.rectifies or node.row.axes is SAME):
            return Origins(names, constants, known.axis, known.parts)
        axis = self._joining_axis(node, reads)
        parts: list[tuple[str, int]] = []
        if axis is None:
            return Origins(names, constants)
        for name in reads:
            inner = self.origins.get(name)
            if inner is None:
                length = (self.graph.by_name[name].shape or ())[axis]
                assert length is not None  # `_joining_axis` has added it up
                parts.append((self._name(_leaf_label(self.graph, name)), length))
            elif inner.axis == axis:
                parts += inner.parts
            else:
                return Origins(names, constants)
        return Origins(names, constants, axis, tuple(parts))

    def _joining_axis(self, node: Node, reads: tuple[str, ...]) -> int | None:
        """Return the axis along which a join puts what it reads one after the other, None if
        there is no such axis.
        """
        if node.row.axes is not JOINED or not node.shape:
            return None
        axis = int(node.attrs.get("dim", 0)) % node.rank
        total = 0
        for name in reads:
            operand = self.graph.by_name[name]
            shape = operand.shape or ()
            length = shape[axis] if len(shape) == node.rank else None
            if length is None:
                return None
            total += length
        return axis if total == node.shape[axis] else None


class _SourceLabels:
    """Labels each value with the number of the node that made it, counted from 1.

    Attributes:
        known: the labels of joins and of what is moved out of them; None if values decide what
            is moved.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = meta_values(graph)
        self.known: dict[str, Any] = {}

    def of(self, node: Node) -> list[Tensor] | None:
        """Return the labels of each result of a node, None if they are not known."""
        try:
            labels = self._moved(node)
        except UNFOLLOWED:
            labels = None
        self.known[node.name] = labels
        if labels is None:
            return None
        return [*labels] if isinstance(labels, (list, tuple)) else [labels]

    def _moved(self, node: Node) -> Any:
        """Return the labels after the node.

        Raises:
            ValueError: they are not known. Torch may raise other errors of `UNFOLLOWED`.
        """
        moved = node.row.joins if node.is_join else tuple(node.inputs)[:1]
        labels: dict[str, Any] = {}
        for key in moved:
            if key in node.inputs:
                labels[key] = map_refs(node.inputs[key], self._label)
            elif key in node.attrs:
                labels[key] = _CONSTANT if _is_nonzero(node.attrs[key]) else _ZERO
        first = next(iter(labels.values()))
        if node.row.rectifies or node.row.axes is SAME:
            return first
        if node.row.axes is RESHAPED:
            return first.reshape(self.values[node.name].shape)
        blended = self._blended(node, first)
        if blended is not None:
            return blended[:1] if isinstance(blended, list) else blended
        if not node.is_join and not node.row.only_moves:
            return None  # a maximum or a sorting picks by value
        arguments = {key: value for key, value in node.attrs.items() if key not in moved}
        for key, value in node.inputs.items():
            if key not in moved:
                arguments[key] = map_refs(value, self._constant)
        if node.row.axes is PADDED and not pads_zeros(node.attrs):
            arguments["value"] = _CONSTANT
        return call(node.target, arguments | labels)

    def _blended(self, node: Node, labels: Any) -> Any:
        """Return the labels after windows, resizing or padding with zeros; None if labels
        change along the axes that these are on.
        """
        rule = node.row.axes
        source = self.graph.source(node)
        if rule is None or rule.runs or source is None or not isinstance(labels, Tensor):
            return None
        return carried(self.graph, node, {source.name: compress_labels(labels)})

    def _label(self, name: str) -> Any:
        """Return the labels of a value: of a join, or one number for all that another node
        makes.
        """
        if name not in self.known:
            label = _leaf_label(self.graph, name)
            return torch.full((), label, dtype=torch.int16).expand(self.values[name].shape)
        if self.known[name] is None:
            raise ValueError(f"the labels of {name} are not known")
        return self.known[name]

    def _constant(self, name: str) -> Any:
        """Return what a node makes of constants alone, such as indices.

        Raises:
            ValueError: it depends on the network's inputs.
        """
        node = self.graph.by_name[name]
        value = self.values.get(name)
        if isinstance(value, (int, float)):
            return value  # a size
        if node.op == "constant":
            return loaded(self.graph.weight(node)).cpu()
        if node.params or node.op == "input" or not node.row.aten:
            raise ValueError(f"{name} is not a constant")
        return run_node(node, self._constant)


def _leaf_label(graph: Graph, name: str) -> int:
    """Return the label of a value that no join made."""
    node = graph.by_name[maker(graph, name)]
    if not node.row.is_constant:
        return 1 + graph.index[node.name]
    number = node.attrs.get("fill_value", node.attrs.get("s"))
    is_zero = node.op in _FULL and not _is_nonzero(number)
    is_zero |= node.row.unwritten or node.op in _ZEROS
    return _ZERO if is_zero else _CONSTANT


def _is_nonzero(number: Any) -> bool:
    """Return whether an argument is a number other than zero."""
    return isinstance(number, (int, float)) and number != 0


def _has_parts(graph: Graph) -> bool:
    """Return whether positions matter: parts of a join may be overwritten or picked, or are
    moved before they are read.
    """
    after: set[str] = set()
    moved: set[str] = set()
    for node in graph.nodes:
        reads_moved = not moved.isdisjoint(node.refs())
        if node.is_join:
            if node.row.axes is not JOINED:
                return True
            after.add(node.name)
        elif node.row.keeps_scale and not after.isdisjoint(node.refs()):
            after.add(node.name)
            is_moved = node.row.only_moves and node.row.axes is not SAME
            if is_moved or reads_moved:
                moved.add(node.name)
            if node.op == "getitem" or _elements(node) < _elements(graph.source(node)):
                return True
        elif reads_moved and (node.row.axes is not None or node.row.kind in ("mac", "float")):
            return True
    return False


def _elements(node: Node | None) -> int:
    """Return the number of values for one sample, 0 if it is not known."""
    if node is None or node.shape is None:
        return 0
    return math.prod(size for size in node.shape if size is not None)


@dataclass(frozen=True)
class Runs:
    """Parts that are one after the other along one axis of a value.

    Attributes:
        axis: counted from the first.
        numbers: which part each index along it belongs to.
    """

    axis: int
    numbers: tuple[int, ...]

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the start and the length of each part, by number; nothing if a part is in
        several places.
        """
        spans: dict[int, tuple[int, int]] = {}
        previous: int | None = None
        for index, number in enumerate(self.numbers):
            if number != previous and number in spans:
                return {}
            first, length = spans.get(number, (index, 0))
            spans[number] = (first, length + 1)
            previous = number
        return spans


def computed_parts(graph: Graph, origins: Mapping[str, Origins]) -> dict[str, Runs]:
    """Return where the parts of joins are in values that are computed from them, by the node
    that makes such a value.

    Args:
        graph: the traced network.
        origins: of its joins, and of what is moved out of them.
    """
    readers: set[str] = set()
    for name in origins:
        readers.update(graph.consumers[name])
    readers -= {"", *origins}
    # Without such a reader there is no need for the shapes of all values
    if not any(_keeps_channels_apart(graph.by_name[name]) for name in readers):
        return {}
    walk = _PartNumbers(graph)
    runs: dict[str, Runs] = {}
    for node in graph.nodes:
        if node.name in origins:
            walk.start(node, origins[node.name])
            continue
        run = walk.follow(node)
        if run is not None:
            runs[node.name] = run
    return runs


def _keeps_channels_apart(node: Node) -> bool:
    """Return whether channels may be in what an operator makes as they are in its input."""
    if not node.is_float or node.row.weight:
        return False
    return node.row.axes is not None or is_pointwise(node)


class _PartNumbers:
    """Moves the numbers of parts through the nodes in order.

    Attributes:
        known: the labels of each value that has parts.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = meta_values(graph)
        self.known: dict[str, Any] = {}

    def start(self, node: Node, origins: Origins) -> None:
        """Number the parts of a join, or of what is moved out of one."""
        value = self.values.get(node.name)
        if origins.axis is None or len(origins.parts) < 2 or not isinstance(value, Tensor):
            return
        lengths = torch.tensor([length for _, length in origins.parts])
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
        if len(numbers) == value.shape[origins.axis]:
            labels = along_axis(numbers, value.shape, origins.axis)
            self.known[node.name] = compress_labels(labels)

    def follow(self, node: Node) -> Runs | None:
        """Return where the parts are in what a node makes, None if it has none or they are
        mixed.
        """
        if self.known.keys().isdisjoint(node.refs()):
            return None
        if is_pointwise(node):
            numbers = self._pointwise(node)
        else:
            numbers = carried(self.graph, node, self.known)
        if numbers is None:
            return None
        self.known[node.name] = numbers
        if not isinstance(numbers, Tensor):
            return None
        axes = changing_axes(numbers)
        along = channels_along(numbers, axes[0]) if len(axes) == 1 else None
        if along is None or min(along) < 0:
            return None
        return Runs(axes[0], along)

    def _pointwise(self, node: Node) -> Tensor | None:
        """Return the numbers after an operator on several values, None unless all of these that
        have parts have them in the same places.
        """
        value = self.values.get(node.name)
        if not node.is_float or not isinstance(value, Tensor):
            return None
        common: Tensor | None = None
        for name in node.refs():
            numbers = self.known.get(name)
            if numbers is None:
                continue
            if not isinstance(numbers, Tensor):
                return None
            try:
                expanded = numbers.expand(value.shape)
            except RuntimeError:
                # The operand only lends its shape or its dtype
                return None
            if common is not None and not torch.equal(common, expanded):
                return None
            common = expanded
        return None if common is None else compress_labels(common)
