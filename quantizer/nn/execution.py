"""One forward pass of a network over one batch. It can stop before any node, continue, branch
off, or be given a node's value.

Values are freed after their last use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Graph, Node, map_refs
from quantizer.nn.image_layout import channels_first

Watchers = Mapping[str, Callable[[Tensor], None]]
"""Functions that are called with the value of a node, by the node's name."""
NO_WATCHERS: Watchers = {}


class Runnable(Protocol):
    """A network that is executed node by node.

    `last_uses` names for each node the values that no later node reads, `overwritten` the nodes
    whose values their reader overwrites.
    """

    graph: Graph
    last_uses: Mapping[str, Sequence[str]]
    overwritten: Collection[str]

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """Return the node's value. `values` has those of the nodes that it reads, and that of
        the node itself if it is an input.
        """


class Execution:
    """The values that are alive between two nodes. `position` is the next node's index.

    Args:
        network: the network that runs.
        inputs: its inputs for the batch, in order.
    """

    def __init__(self, network: Runnable, inputs: Sequence[Any]) -> None:
        names = [node.name for node in network.graph.nodes if node.op == "input"]
        self.network = network
        self.position = 0
        self.values: dict[str, Any] = dict(zip(names, inputs, strict=True))

    def branch(self) -> Execution:
        """Return another execution that continues from here. This one stays where it is."""
        other = copy.copy(self)
        other.values = dict(self.values)
        for name in self.network.overwritten:
            if name in other.values:
                other.values[name] = other.values[name].clone()
        return other

    def step(self, watch: Watchers = NO_WATCHERS) -> tuple[str, Any]:
        """Run the next node, show its value to its watcher, and return its name and value."""
        node = self.network.graph.nodes[self.position]
        value = self.network.run_node(node, self.values)
        if node.name in watch:
            watch[node.name](value)
        self.put(value)
        return node.name, value

    def put(self, value: Any) -> None:
        """Set the value of the next node instead of running it."""
        name = self.network.graph.nodes[self.position].name
        self.values[name] = value
        for unread in self.network.last_uses[name]:
            del self.values[unread]
        self.position += 1

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Run the remaining nodes, and yield each one's name and value, valid until the
        next.
        """
        while self.position < len(self.network.graph.nodes):
            yield self.step()

    def advance(self, stop: int | None = None, watch: Watchers = NO_WATCHERS) -> Execution:
        """Run the nodes before index `stop`, by default all that remain, and return self."""
        if stop is None:
            stop = len(self.network.graph.nodes)
        while self.position < stop:
            self.step(watch)
        return self

    def output(self) -> Any:
        """Return the network's output, in the type of the traced model's, once all nodes have
        run.
        """
        graph = self.network.graph
        output = channels_first(self._raw_output())
        return graph.rebuild(output) if graph.rebuild else output

    def outputs(self) -> list[Tensor]:
        """Return the tensors of the network's output, in order. A complex one is given as its
        real view.
        """
        tensors = []
        for leaf in pytree.tree_leaves(self._raw_output()):
            if isinstance(leaf, Tensor) and leaf.is_complex():
                tensors.append(torch.view_as_real(leaf))
            elif isinstance(leaf, Tensor):
                tensors.append(leaf)
        return tensors

    def float_outputs(self) -> list[Tensor]:
        """Return the floating-point tensors of the network's output, in order."""
        return float_leaves(self.outputs())

    def _raw_output(self) -> Any:
        return map_refs(self.network.graph.output, self.values.__getitem__)


def float_leaves(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested output, in order."""
    tensors = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            tensors.append(leaf)
    return tensors


def layer_arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a node's layer.

    Nothing may keep the dict, as it would keep the values alive.
    """
    if node.op == "input":
        return {"input": values[node.name]}
    return {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
