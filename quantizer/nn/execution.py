"""One pass of a network over one batch: it can stop before any node, go on, branch off, or be
given a node's value.

Executes and forgets what nothing reads any more. It decides nothing.
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
"""Who looks at the value of a node, by its name."""
NOBODY: Watchers = {}


class Runnable(Protocol):
    """What can be executed node by node; `last_uses` names for each node the values that
    nothing reads after it, `overwritten` the nodes whose values their reader overwrites.
    """

    graph: Graph
    last_uses: Mapping[str, Sequence[str]]
    overwritten: Collection[str]

    def run_node(self, node: Node, values: Mapping[str, Any]) -> Any:
        """The node's value, given those of the nodes that it reads; an input finds its own
        among them.
        """


class Execution:
    """Values that are alive between the nodes that have run and those that will; `position` is
    the next node's index.

    Args:
        network: what runs.
        inputs: its inputs for the batch, in order.
    """

    def __init__(self, network: Runnable, inputs: Sequence[Any]) -> None:
        names = [node.name for node in network.graph.nodes if node.op == "input"]
        self.network, self.position = network, 0
        self.values: dict[str, Any] = dict(zip(names, inputs, strict=True))

    def branch(self) -> Execution:
        """Another execution that goes on from here, while this one stays where it is."""
        other = copy.copy(self)
        other.values = {
            name: value.clone() if name in self.network.overwritten else value
            for name, value in self.values.items()
        }
        return other

    def step(self, watch: Watchers = NOBODY) -> tuple[str, Any]:
        """Run the next node, and show its value to who watches it; returns its name and
        value.
        """
        node = self.network.graph.nodes[self.position]
        value = self.network.run_node(node, self.values)
        if node.name in watch:
            watch[node.name](value)
        self.put(value)
        return node.name, value

    def put(self, value: Any) -> None:
        """Take `value` for that of the next node instead of running it."""
        name = self.network.graph.nodes[self.position].name
        self.values[name] = value
        for unread in self.network.last_uses[name]:
            del self.values[unread]
        self.position += 1

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Run what is left; each node's name and value, valid until the next."""
        while self.position < len(self.network.graph.nodes):
            yield self.step()

    def advance(self, stop: int | None = None, watch: Watchers = NOBODY) -> Execution:
        """Run the nodes before index `stop`, or all that are left; returns itself."""
        while self.position < (len(self.network.graph.nodes) if stop is None else stop):
            self.step(watch)
        return self

    def output(self) -> Any:
        """What the network returns, once all nodes have run, in the type of the traced
        model.
        """
        graph = self.network.graph
        output = channels_first(map_refs(graph.output, self.values.__getitem__))
        return graph.rebuild(output) if graph.rebuild else output

    def outputs(self) -> list[Tensor]:
        """The tensors among what the network returns, in order; of complex ones their real
        view.
        """
        leaves = pytree.tree_leaves(
            map_refs(self.network.graph.output, self.values.__getitem__)
        )
        return [
            torch.view_as_real(leaf) if leaf.is_complex() else leaf
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]

    def float_outputs(self) -> list[Tensor]:
        """The floating-point tensors among what the network returns, in order."""
        return float_leaves(self.outputs())


def float_leaves(output: Any) -> list[Tensor]:
    """The floating-point tensors in a nested output, in order."""
    return [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def arguments(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a node's layer; the dict is kept by nobody, as it would keep the
    values.
    """
    if node.op == "input":
        return {"input": values[node.name]}
    return {key: map_refs(value, values.__getitem__) for key, value in node.inputs.items()}
