"""The layers that make the values of a network's outputs, before these are moved and joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.op_row import ELEMENTWISE
from quantizer.graph.targets import resolve_target

_UNTAGGED = ("aten.floor_divide.default", "aten.floor_divide.Scalar")
"""Pointwise operators that torch does not tag as such."""


@cache
def _is_tagged_pointwise(target: str) -> bool:
    """Return whether torch tags an operator as pointwise."""
    try:
        operator = resolve_target(target)
    except (ValueError, AttributeError):
        return False
    return torch.Tag.pointwise in getattr(operator, "tags", ())


def is_pointwise(node: Node) -> bool:
    """Return whether each value that a node makes follows from the values in the same place
    of its operands.
    """
    if node.row.axes in ELEMENTWISE or node.target in _UNTAGGED:
        return True
    return _is_tagged_pointwise(node.target)


@dataclass(frozen=True)
class Seen:
    """What a run has shown of values.

    Args:
        shapes: of all that a replay needs.
        values: those that steer moves.
    """

    shapes: Mapping[str, torch.Size]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class SeenOutput:
    """The value of an output in one run, and the shapes and values recorded in that run."""

    value: Tensor
    seen: Seen

    def of_tokens(self, included: Tensor) -> SeenOutput:
        """Return it without padding: one sample that has all tokens, so that axes keep their
        numbers.

        Args:
            included: bool [samples, positions], the first axes of the value.
        """
        mask = included.to(self.value.device)
        return SeenOutput(self.value[mask].unsqueeze(0), self.seen)


def moved_operands(node: Node) -> list[str]:
    """Return the nodes whose values a node moves or joins, in the order of its arguments."""
    keys = node.row.joins
    if not keys and node.row.only_moves:
        keys = tuple(node.inputs)[:1]
    operands = [node.inputs.get(key) for key in keys]
    return list(dict.fromkeys(references(operands)))


class Provenance:
    """Traces values of one graph back to their sources.

    Attributes:
        depends: whether a node's value depends on the network's inputs.
        joined: whether a node's value has several sources side by side.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.depends: dict[str, bool] = {}
        self.joined: dict[str, bool] = {}
        for node in graph.nodes:
            is_input = node.op == "input" and node.shape is not None
            reads = node.row.reads_values and any(self.depends[name] for name in node.refs())
            self.depends[node.name] = is_input or reads
            self.joined[node.name] = self._is_joined(node)

    def is_join(self, node: Node) -> bool:
        """Return whether a node puts values of several sources, or filled in ones, side by
        side.
        """
        if not node.is_join or not self.depends[node.name]:
            return False
        written = [key for key in node.row.joins if key in node.inputs or key in node.attrs]
        return len(written) > 1 or len(moved_operands(node)) > 1

    def carrier(self, node: Node) -> str | None:
        """Return the operand whose parts a pointwise operator keeps: the first that has some,
        else the first.
        """
        if not is_pointwise(node) or node.row.joins:
            return None
        operands = [name for name in node.refs() if self.depends[name]]
        for name in operands:
            if self.joined.get(name):
                return name
        return operands[0] if operands else None

    def _is_joined(self, node: Node) -> bool:
        if self.is_join(node):
            return True
        operand = self.before(node)
        return operand is not None and self.joined[operand]

    def before(self, node: Node) -> str | None:
        """Return the node whose values another one moves, or uses element by element."""
        carrier = self.carrier(node)
        if carrier is not None:
            return carrier
        if node.row.joins or not node.row.only_moves:
            return None
        moved = moved_operands(node)
        if any(self.depends[name] for name in node.refs() if name not in moved):
            return None  # values decide what is moved
        return moved[0] if moved else None

    def sources(self, end: str) -> tuple[list[str], dict[str, str]]:
        """Return the nodes that make the parts of a value, and the operand that each pointwise
        operator keeps.
        """
        sources: list[str] = []
        carriers: dict[str, str] = {}
        visited: set[str] = set()
        pending = [end]
        while pending:
            name = pending.pop(0)
            if name in visited:
                continue
            visited.add(name)
            node = self.graph.by_name[name]
            if not self.joined[name]:
                sources.append(name)
            elif self.is_join(node):
                pending += moved_operands(node)
            else:
                operand = self.before(node)
                assert operand is not None  # otherwise it would not be joined
                if self.carrier(node) is not None:
                    carriers[name] = operand
                pending.append(operand)
        return sources, carriers

    def maker(self, name: str) -> Node:
        """Return the layer that makes a source: the nearest before it that does more than
        move or bend values.
        """
        node = self.graph.by_name[name]
        operand = self.before(node)
        while operand is not None and "weight" not in node.params:
            node = self.graph.by_name[operand]
            operand = self.before(node)
        return node


@dataclass(frozen=True)
class PartRange:
    """The place of a part that is all of an output between two indices of one axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class OutputPart:
    """Values of an output that one layer makes.

    Attributes:
        name: unique among all outputs and parts of a network.
        index: another name, where the part is a range along one axis, as in `0[4:7]`.
        layer: the node that makes it, the last before it is joined; "" for what is filled in.
        is_constant: whether it depends on no input.
        pooled: how many sources it stands for.
        place: where it is, if it is such a range.
    """

    name: str
    index: str | None
    layer: str
    is_constant: bool = False
    pooled: int = 1
    place: PartRange | None = None
