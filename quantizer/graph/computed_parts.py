"""Where the parts of a join are in values that are computed from it: element by element, window
by window, or moved after that.

Part numbers are followed through operators that keep channels apart. This file knows no config
and no scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node
from quantizer.graph.label_replay import is_pointwise
from quantizer.graph.labels import (
    ChannelLabels,
    along_axis,
    changing_axes,
    channels_along,
    compress_labels,
)
from quantizer.graph.origins import Origins


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
        self.labels = ChannelLabels(graph)
        self.known: dict[str, Any] = {}

    def start(self, node: Node, origins: Origins) -> None:
        """Number the parts of a join, or of what is moved out of one."""
        value = self.labels.values.get(node.name)
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
            numbers = self.labels.carried(node, self.known)
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
        value = self.labels.values.get(node.name)
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
