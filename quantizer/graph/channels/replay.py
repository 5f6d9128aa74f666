"""Run the operators that move and join values on labels, to find where each value of a result
comes from.

Values that only steer a move (sizes, indices, masks) are taken from a real run. Before there is
one, the sizes follow from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.channels.axis_rules import RESHAPED
from quantizer.graph.channels.labels import example_shape, run_node
from quantizer.graph.channels.provenance import Seen, moved_operands
from quantizer.graph.ir import Graph, Node, walk_back

FILLED = 0
"""The label of what an operator fills in: padding, the value of a mask."""
UNWRITTEN = -1
"""The label of memory that nothing has written."""


class ExampleValues(dict[str, Any]):
    """The sizes that follow from the graph before there is a batch.

    Values of masks and indices are missing.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __missing__(self, name: str) -> Any:
        node = self._graph.by_name[name]
        if node.shape is not None:
            raise KeyError(name)
        return run_node(node, self._operand)

    def _operand(self, name: str) -> Any:
        """Return a size, or a tensor without memory that has the size in question."""
        shape = example_shape(self._graph.by_name[name])
        return self[name] if shape is None else torch.empty(()).expand(shape)


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


def _filling_labels(node: Node) -> Node:
    """Return a node that fills in the label `FILLED` instead of a number."""
    attrs = dict(node.attrs)
    for key, value in attrs.items():
        is_value = key == "value" and value is not None
        if is_value or key in node.row.joins:
            attrs[key] = float(FILLED)
    return replace(node, attrs=attrs)
