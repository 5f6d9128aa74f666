"""Trace the values that a network returns back to the layers that make them. To find where each
value of a result comes from, run the operators that move and join values on labels.

Values that only steer a move (sizes, indices, masks) are taken from a real run. Before there is
one, the sizes follow from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import RESHAPED
from quantizer.graph.channels.labels import example_shape, run_node
from quantizer.graph.ir import Graph, Node, references, walk_back
from quantizer.graph.op_row import ELEMENTWISE
from quantizer.graph.targets import resolve_target

FILLED = 0
"""The label of what an operator fills in: padding, the value of a mask."""
UNWRITTEN = -1
"""The label of memory that nothing has written."""
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


class ExampleValues(Mapping[str, Any]):
    """The sizes that follow from the graph before there is a batch.

    Values of masks and indices are missing.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getitem__(self, name: str) -> Any:
        node = self._graph.by_name[name]
        if node.shape is not None:
            raise KeyError(name)
        return run_node(node, self._operand)

    def __iter__(self) -> Any:
        return iter(self._graph.by_name)

    def __len__(self) -> int:
        return len(self._graph.nodes)

    def _operand(self, name: str) -> Any:
        """Return a size, or a tensor without memory that has the size in question."""
        shape = example_shape(self._graph.by_name[name])
        return self[name] if shape is None else torch.empty(()).expand(shape)


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


Spread = Callable[[Node, Tensor, torch.Size], Tensor]
"""Returns the labels of what a node computes, which has this shape, from those of one
operand.
"""


def _expanded(_node: Node, labels: Tensor, shape: torch.Size) -> Tensor:
    return labels.expand(shape)


class Replay:
    """The nodes between labelled values and one value that is made of them.

    Attributes:
        nodes: what runs on labels, in execution order.
        carriers: for each of `nodes` that computes, the operand whose labels it keeps. The
            function `spread` says how.
        steering: the values, not labelled, that decide what is moved where.
        shaped: the nodes whose shapes are needed.
    """

    def __init__(
        self,
        graph: Graph,
        end: str,
        labelled: Iterable[str],
        carriers: Mapping[str, str],
        *,
        spread: Spread = _expanded,
    ) -> None:
        self.end = end
        self.labelled = frozenset(labelled)
        self.carriers = carriers
        self._spread = spread
        inside = self._between(graph)
        self.nodes = [node for node in graph.nodes if node.name in inside]
        read: set[str] = set()
        shaped = set(self.labelled)
        for node in self.nodes:
            if node.name in carriers or node.row.axes is RESHAPED:
                shaped.add(node.name)
            if node.name not in carriers:
                read.update(node.refs())
        self.steering = frozenset(read - inside - self.labelled)
        self.shaped = frozenset(shaped)

    def _between(self, graph: Graph) -> set[str]:
        """Return the nodes that carry labels to the end."""

        def operands(node: Node) -> list[str]:
            if node.name in self.labelled:
                return []
            if node.name in self.carriers:
                return [self.carriers[node.name]]
            return moved_operands(node)

        inside = {node.name for node in walk_back(graph, [self.end], operands)}
        return inside - self.labelled

    def run(self, labels: Mapping[str, Any], seen: Seen) -> Any:
        """Return the labels of the last node's value.

        Args:
            labels: tensors of labels, by the names of `labelled`.
            seen: the shapes of `shaped`, the values of `steering`.

        Raises:
            KeyError: a steering value is not known.
            RuntimeError, TypeError, ValueError, IndexError: an operator cannot run on labels.
        """
        known = dict(labels)

        def operand(name: str) -> Any:
            return known[name] if name in known else seen.values[name]

        for node in self.nodes:
            if node.name in self.carriers:
                carried = known[self.carriers[node.name]]
                known[node.name] = self._spread(node, carried, seen.shapes[node.name])
            elif node.row.axes is RESHAPED:
                source = known[next(node.refs())]
                known[node.name] = source.reshape(seen.shapes[node.name])
            else:
                known[node.name] = run_node(_filling_labels(node), operand)
        return known[self.end]


def moved_operands(node: Node) -> list[str]:
    """Return the nodes whose values a node moves or joins, in the order of its arguments."""
    keys = node.row.joins
    if not keys and node.row.only_moves:
        keys = tuple(node.inputs)[:1]
    operands = [node.inputs.get(key) for key in keys]
    return list(dict.fromkeys(references(operands)))


def _filling_labels(node: Node) -> Node:
    """Return a node that fills in the label `FILLED` instead of a number."""
    attrs = dict(node.attrs)
    for key, value in attrs.items():
        is_value = key == "value" and value is not None
        if is_value or key in node.row.joins:
            attrs[key] = float(FILLED)
    return replace(node, attrs=attrs)


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
