"""Runs a network one layer at a time over all batches, so that an algorithm can settle a layer before the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.graph.ir import Node, map_refs
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch


class Walk:
    """Values of every batch between the layer that makes them and the last that reads them.

    Go through `network.graph.nodes` in order: `calls(node)` gives each batch's arguments for its layer, `done(node,
    values)` takes each batch's result; `keep` and `release` are its halves. One walk costs what a pass over the data
    costs: `for node in network.graph.nodes: walk.done(node, (walk.run(node, call) for call in walk.calls(node)))`.
    """

    def __init__(self, network: Network, batches: Iterable[Batch], store: ActivationStore | None = None) -> None:
        self.network = network
        self._store = store or ActivationStore()
        self._values: dict[str, list[Any]] = {}
        inputs = [node.name for node in network.graph.nodes if node.op == "input"]
        rows = list(self._store.keep_inputs(network, batches))
        self.batches = len(rows)
        self._inputs = {name: [row[index] for row in rows] for index, name in enumerate(inputs)}

    def calls(self, node: Node) -> list[dict[str, Any]]:
        """The arguments of the node's layer, batch by batch."""
        if node.op == "input":
            return [{"input": value} for value in self._inputs[node.name]]
        return [
            {key: map_refs(value, lambda name, at=index: self._values[name][at]) for key, value in node.inputs.items()}  # type: ignore[misc]
            for index in range(self.batches)
        ]

    def run(self, node: Node, call: dict[str, Any]) -> Any:
        """The node's layer on one batch."""
        return self.network.run_layer(node, call)

    def keep(self, node: Node, values: Iterable[Any]) -> list[Any]:
        """Keep the node's value of each batch, one by one as they come; what is returned may be changed in place."""
        self._values[node.name] = kept = [self._store.keep(value) for value in values]
        return kept

    def release(self, node: Node) -> None:
        """Let go of all that nothing reads after this node."""
        if node.op == "input":
            self._store.free(self._inputs.pop(node.name))
        for name in self.network.last_uses[node.name]:
            self._store.free(self._values.pop(name))

    def done(self, node: Node, values: Iterable[Any]) -> None:
        """The node is settled: keep its value of each batch, and let go of what nothing reads any more."""
        self.keep(node, values)
        self.release(node)

    def outputs(self) -> Iterator[Any]:
        """What the network returns for each batch, once every node is done."""
        graph = self.network.graph
        for index in range(self.batches):
            output = map_refs(graph.output, lambda name, at=index: self._values[name][at])  # type: ignore[misc]
            yield graph.rebuild(output) if graph.rebuild else output
