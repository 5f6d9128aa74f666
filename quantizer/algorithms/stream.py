"""Runs a network over all batches leg by leg, so that an algorithm can change layers before the values go on.

Between legs it keeps what later nodes read, of every batch; within a leg it runs batch by batch, as a plain pass does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.errors import DataError
from quantizer.nn.network import Network, arguments
from quantizer.sources.batches import Batch, naming_batch

Watchers = Mapping[str, Callable[[Tensor], None]]


class Stream:
    """`advance` as far as a node, change layers that come after it, go on: all legs together cost one pass.

    Memory holds the batches' inputs and what is alive at the end of a leg: between two blocks, their common value and
    what all blocks read.
    """

    def __init__(self, network: Network, batches: Iterable[Batch], store: ActivationStore | None = None) -> None:
        self.network, self._at = network, 0
        self._store = store or ActivationStore()
        names = [node.name for node in network.graph.nodes if node.op == "input"]
        rows = self._store.keep_inputs(network, batches)
        self._values: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
        if not self._values:
            raise DataError("the calibration data has no batches", help="check --data and --subset_len")

    @property
    def batches(self) -> int:
        """How many batches there are."""
        return len(self._values)

    def value(self, name: str) -> list[Any]:
        """A node's value for each batch, while a later node reads it."""
        return [values[name] for values in self._values]

    def branch(self) -> Stream:
        """Another stream that goes on from here with the same network, while this one stays where it is."""
        branch = copy.copy(self)
        branch._store, branch._values = ActivationStore(), [dict(values) for values in self._values]
        return branch

    def advance(self, upto: str | None = None, watch: Watchers | None = None) -> None:
        """Run all batches up to and with node `upto`, or to the end; values of watched nodes are shown as they come,
        of those that ran in an earlier leg first.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        nodes = self.network.graph.nodes
        index = {node.name: at for at, node in enumerate(nodes)}
        stop = len(nodes) if upto is None else index[upto] + 1
        earlier = [name for name in watch or {} if index[name] < self._at]
        for number, values in enumerate(self._values):
            before = dict(values)
            with naming_batch(number), torch.no_grad():
                for name in earlier:
                    (watch or {})[name](values[name])
                self._run(nodes[self._at : stop], values, watch or {})
            for name in before.keys() - values.keys():
                self._store.free(before[name])
            for name in values.keys() - before.keys():
                values[name] = self._store.keep(values[name])
        self._at = max(stop, self._at)

    def _run(self, nodes: tuple[Any, ...], values: dict[str, Any], watch: Watchers) -> None:
        for node in nodes:
            values[node.name] = self.network.run_layer(node, arguments(node, values))
            if node.name in watch:
                watch[node.name](values[node.name])
            for name in self.network.last_uses[node.name]:
                del values[name]
