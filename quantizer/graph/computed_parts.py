"""Where the parts of a join lie in what is computed of it element by element, window by window,
or moved after that.

Follows numbers of parts through operators that keep channels apart. Knows no config and no
scale.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.axis_rules import changes
from quantizer.graph.channel_labels import ChannelLabels, channels_along, compressed
from quantizer.graph.ir import Graph, Node
from quantizer.graph.label_replay import is_pointwise
from quantizer.graph.origins import Origins


@dataclass(frozen=True)
class Runs:
    """Parts that lie one after the other along one axis of a value.

    Attributes:
        axis: counted from the first.
        numbers: which part each index along it belongs to.
    """

    axis: int
    numbers: tuple[int, ...]

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return where each part begins and how long it is, by number; nothing if a part lies
        in several places.
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
    """Return where the parts of joins lie in values that are computed of them, by the node that
    makes such a value.

    Args:
        graph: the traced network.
        origins: of its joins, and of what is moved out of them.
    """
    if not any(_is_computed_on(graph, name, origins) for name in origins):
        return {}
    walk = _Walk(graph)
    found: dict[str, Runs] = {}
    for node in graph.nodes:
        known = origins.get(node.name)
        if known is not None:
            walk.start(node, known)
            continue
        runs = walk.follow(node)
        if runs is not None:
            found[node.name] = runs
    return found


def _is_computed_on(graph: Graph, name: str, origins: Container[str]) -> bool:
    """Whether an operator that keeps channels apart reads a value, and does not only move
    it.
    """
    for reader in graph.consumers[name]:
        if reader and reader not in origins and _keeps_apart(graph.by_name[reader]):
            return True
    return False


def _keeps_apart(node: Node) -> bool:
    """Whether channels may lie in what an operator makes as they do in what it reads."""
    return (
        node.is_float
        and not node.row.weight
        and (node.row.axes is not None or is_pointwise(node))
    )


class _Walk:
    """Takes numbers of parts through the nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.labels = graph, ChannelLabels(graph)
        self.known: dict[str, Any] = {}

    def start(self, node: Node, origins: Origins) -> None:
        """Number the parts of a join, or of what is moved out of one."""
        made = self.labels.values.get(node.name)
        if origins.axis is None or len(origins.parts) < 2 or not isinstance(made, Tensor):
            return
        lengths = torch.tensor([length for _, length in origins.parts])
        numbers = torch.arange(len(lengths), dtype=torch.float32).repeat_interleave(lengths)
        if len(numbers) != made.shape[origins.axis]:
            return
        shape = [1] * made.dim()
        shape[origins.axis] = -1
        self.known[node.name] = compressed(numbers.view(shape).expand(made.shape))

    def follow(self, node: Node) -> Runs | None:
        """Return where the parts lie in what a node makes, None if it has none or they are
        mixed.
        """
        if self.known.keys().isdisjoint(node.refs()):
            return None
        numbers = (
            self._computed(node)
            if is_pointwise(node)
            else self.labels.carried(node, self.known)
        )
        if numbers is None:
            return None
        self.known[node.name] = numbers
        if not isinstance(numbers, Tensor):
            return None
        axes = [axis for axis in range(numbers.dim()) if changes(numbers, axis)]
        along = channels_along(numbers, axes[0]) if len(axes) == 1 else None
        return None if along is None or min(along) < 0 else Runs(axes[0], along)

    def _computed(self, node: Node) -> Tensor | None:
        """The numbers after an operator on several values, of which some have parts, all in the
        same places.
        """
        made = self.labels.values.get(node.name)
        if not node.is_float or not isinstance(made, Tensor):
            return None
        found: Tensor | None = None
        for name in node.refs():
            numbers = self.known.get(name)
            if numbers is None:
                continue
            if not isinstance(numbers, Tensor):
                return None
            spread = numbers.expand(made.shape)
            if found is not None and not torch.equal(found, spread):
                return None
            found = spread
        return None if found is None else compressed(found)
