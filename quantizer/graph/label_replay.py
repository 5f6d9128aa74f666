"""Runs the operators that move and join values on labels, numbers that say where each value
comes from.

Values that only steer a move (sizes, indices, masks) are those of a real run or, before one,
what the graph knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.axis_rules import ALIKE, PRODUCT, QUOTIENT, RESHAPED, SAME
from quantizer.graph.ir import Graph, Node, map_refs, references
from quantizer.graph.targets import call, resolve

FILLED = 0
"""The label of what an operator fills in: padding, the value of a mask."""
UNWRITTEN = -1
"""The label of memory that nothing has written."""
EXAMPLE_BATCH = 2
"""Samples of the shapes that the graph knows before there is a batch."""
_ELEMENTWISE = (SAME, ALIKE, PRODUCT, QUOTIENT)
_UNTAGGED = ("aten.floor_divide.default", "aten.floor_divide.Scalar")
"""Operators that compute element by element, of which torch does not say so."""


@cache
def _is_tagged_pointwise(target: str) -> bool:
    """Return whether torch says of an operator that it computes element by element."""
    try:
        return torch.Tag.pointwise in getattr(resolve(target), "tags", ())
    except (ValueError, AttributeError):
        return False


def is_pointwise(node: Node) -> bool:
    """Return whether each value that a node makes follows from the values in the same place
    of its operands."""
    is_known = node.row.axes in _ELEMENTWISE or node.target in _UNTAGGED
    return is_known or _is_tagged_pointwise(node.target)


def shape_in(graph: Graph, name: str) -> torch.Size | None:
    """Return the shape of what a node makes, for a batch of `EXAMPLE_BATCH`; None if it
    makes no single tensor."""
    shape = graph.by_name[name].shape
    if shape is None:
        return None
    return torch.Size(EXAMPLE_BATCH if size is None else size for size in shape)


class ExampleValues(Mapping[str, Any]):
    """What the graph knows of values before there is a batch: the sizes among them, nothing
    of masks and indices."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getitem__(self, name: str) -> Any:
        node = self._graph.by_name[name]
        if node.shape is not None:
            raise KeyError(name)
        arguments = {key: map_refs(value, self._operand) for key, value in node.inputs.items()}
        return call(node.target, {**node.attrs, **arguments})

    def __iter__(self) -> Any:
        return iter(self._graph.by_name)

    def __len__(self) -> int:
        return len(self._graph.nodes)

    def _operand(self, name: str) -> Any:
        """Return a size, or a tensor without memory of which the size is asked."""
        shape = shape_in(self._graph, name)
        return self[name] if shape is None else torch.empty(()).expand(shape)


@dataclass(frozen=True)
class Seen:
    """What a run has shown of values: the shapes of all that a replay asks for, and the
    values of those that steer."""

    shapes: Mapping[str, torch.Size]
    values: Mapping[str, Any]


Spread = Callable[[Node, Tensor, torch.Size], Tensor]
"""Gives the labels of what a node computes, which has this shape, of those of one operand."""


def _expanded(_node: Node, labels: Tensor, shape: torch.Size) -> Tensor:
    """Return the labels of what is computed element by element."""
    return labels.expand(shape)


class Replay:
    """The nodes between labelled values and one value that is made of them.

    Attributes:
        nodes: what runs on labels, in execution order.
        carriers: for each of `nodes` that computes, the operand whose labels it keeps; how,
            `spread` says.
        steering: the values, not labelled, that say what is moved where.
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
        self.end, self.labelled, self._spread = end, tuple(labelled), spread
        inside = _between(graph, end, frozenset(self.labelled), carriers)
        self.nodes = [node for node in graph.nodes if node.name in inside]
        self.carriers = carriers
        moving = [node for node in self.nodes if node.name not in carriers]
        read = {name for node in moving for name in node.refs()}
        self.steering = frozenset(read - inside - set(self.labelled))
        shaped = set(self.labelled)
        for node in self.nodes:
            if node.name in carriers or node.row.axes is RESHAPED:
                shaped.add(node.name)
        self.shaped = frozenset(shaped)

    def run(self, labels: Mapping[str, Any], seen: Seen) -> Any:
        """Return the labels of the last node's value.

        Args:
            labels: tensors of labels, by the names of `labelled`.
            seen: the shapes of `shaped`, the values of `steering`.

        Raises:
            KeyError: a steering value is not known.
            RuntimeError, TypeError, ValueError, IndexError: an operator cannot run on labels.
        """
        labels_of = dict(labels)

        def operand(name: str) -> Any:
            return labels_of[name] if name in labels_of else seen.values[name]

        for node in self.nodes:
            if node.name in self.carriers:
                carried = labels_of[self.carriers[node.name]]
                labels_of[node.name] = self._spread(node, carried, seen.shapes[node.name])
            elif node.row.axes is RESHAPED:
                source = next(iter(node.refs()))
                labels_of[node.name] = labels_of[source].reshape(seen.shapes[node.name])
            else:
                inputs = {key: map_refs(value, operand) for key, value in node.inputs.items()}
                labels_of[node.name] = call(node.target, {**_constants(node), **inputs})
        return labels_of[self.end]


def _between(
    graph: Graph,
    end: str,
    labelled: frozenset[str],
    carriers: Mapping[str, str],
) -> set[str]:
    """Return the nodes that carry labels to `end`."""
    joins: set[str] = set()
    pending = [end]
    while pending:
        name = pending.pop()
        if name in joins or name in labelled:
            continue
        joins.add(name)
        node = graph.by_name[name]
        pending += [carriers[name]] if name in carriers else moved_operands(node)
    return joins


def moved_operands(node: Node) -> list[str]:
    """Return the nodes whose values a node moves or joins, in the order of its arguments."""
    keys = node.row.joins
    if not keys and node.row.only_moves:
        keys = tuple(node.inputs)[:1]
    names: list[str] = []
    for key in keys:
        names += references(node.inputs.get(key))
    return list(dict.fromkeys(names))


def _constants(node: Node) -> dict[str, Any]:
    """Return the constants of a node's call on labels: what is filled in has a label of its
    own."""
    constants = dict(node.attrs)
    if constants.get("value") is not None:
        constants["value"] = float(FILLED)
    for key, value in constants.items():
        if isinstance(value, torch.device):
            constants[key] = torch.device("cpu")
        elif key in node.row.joins:
            constants[key] = float(FILLED)
    return constants


def filled(shape: torch.Size, label: float) -> Tensor:
    """Return one label for all values of a shape, without memory for each."""
    return torch.full((), float(label)).expand(shape)
