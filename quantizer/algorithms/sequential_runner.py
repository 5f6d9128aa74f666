"""Runs a network over all batches segment by segment or node by node, so that layers change before values go on.

Between segments it keeps what later nodes read, of every batch; within one it runs batch by batch, as a plain pass.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.execution import NOBODY, Execution, Watchers, arguments
from quantizer.nn.network import Network
from quantizer.numerics.deferred import GROWTH, give_back, loaded
from quantizer.sources.batches import Batch, naming_batch


class SequentialRunner:
    """The executions of all batches, at the same node. Going through all nodes costs what one pass over the data costs.

    Segment by segment: `advance` as far as a node, change layers that come after it, go on. Node by node, in order:
    `compute(node)` gives its value for each batch and `keep`s them, `release` goes on to the next node; `done` is all
    three. Memory holds the batches' inputs and what is alive: between two blocks, their common value and what all
    blocks read. Of several ranks each runs its own share of the batches.

    Raises:
        DataError: there is no batch, or one does not fit the network; it is named by its number.
    """

    def __init__(
        self, network: Network, batches: Iterable[Batch], store: ActivationStore | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.network, self.ranks = network, ranks
        self._store = store or ActivationStore()
        self._executions: list[Execution] = []
        count = 0
        for count, batch in enumerate(batches, 1):
            if ranks.owns(count - 1):
                with naming_batch(count - 1):
                    inputs = network.inputs(batch.args, batch.kwargs)
                self._executions.append(Execution(network, [self._store.keep(value) for value in inputs]))
        if not count:
            raise DataError("the calibration data has no batches", help="check --data and --subset_len")

    def value(self, name: str) -> list[Any]:
        """A node's value for each batch, while a later node reads it."""
        return [execution.values[name] for execution in self._executions]

    def branch(self) -> SequentialRunner:
        """Another runner that goes on from here with the same network, while this one stays where it is."""
        other = copy.copy(self)
        other._store, other._executions = (
            ActivationStore(self._store.budget),
            [each.branch() for each in self._executions],
        )
        return other

    def advance(self, upto: str | None = None, watch: Watchers = NOBODY) -> None:
        """Run all batches up to and with node `upto`, or to the end; values of watched nodes are shown as they come,
        of those that ran before first.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        index = self.network.graph.index
        stop = None if upto is None else index[upto] + 1
        for number, execution in self._numbered():
            before, position = dict(execution.values), execution.position
            with naming_batch(number), torch.no_grad():
                for name in watch:
                    if index[name] < position:
                        watch[name](execution.values[name])
                execution.advance(stop, watch)
            self._free(before, execution)
            for name, value in execution.values.items():
                if before.get(name) is not value:
                    execution.values[name] = self._store.keep(value)
            give_back(GROWTH)

    def calls(self, node: Node) -> list[dict[str, Any]]:
        """The arguments of the next node's layer, batch by batch."""
        return [arguments(node, execution.values) for execution in self._executions]

    def compute(self, node: Node) -> Iterator[Any]:
        """The next node's value of each batch, as its layer is now.

        Raises:
            DataError: its layer cannot run on a batch; both are named.
        """
        for number, execution in self._numbered():
            with naming_batch(number):
                value = self.network.run_node(node, execution.values)
            yield value

    def keep(self, values: Iterable[Any]) -> list[Any]:
        """Keep the next node's value of each batch, one by one as they come."""
        return [self._store.keep(value) for value in values]

    def change(self, kept: list[Any], changed: Callable[[Any], Any]) -> None:
        """Put in place of each value that `keep` has kept what is made of it, which may be itself, changed in place."""
        for number, value in enumerate(kept):
            made = changed(loaded(value))
            if made is not value:
                self._store.free(value)
                kept[number] = self._store.keep(made)

    def release(self, kept: Iterable[Any]) -> None:
        """Go on to the next node with these values, which `keep` has kept, and free what nothing reads any more."""
        for execution, value in zip(self._executions, kept, strict=True):
            before = dict(execution.values)
            execution.put(value)
            self._free(before, execution)
        give_back(GROWTH)

    def done(self, node: Node) -> None:
        """Compute the next node, keep its values, and go on to the one after it."""
        self.release(self.keep(self.compute(node)))

    def outputs(self) -> Iterator[Any]:
        """What the network returns for each batch, once every node is done."""
        return (execution.output() for execution in self._executions)

    def _numbered(self) -> Iterator[tuple[int, Execution]]:
        """The executions of this rank with the numbers of their batches."""
        return zip(itertools.count(self.ranks.rank, self.ranks.world_size), self._executions, strict=False)

    def _free(self, before: dict[str, Any], execution: Execution) -> None:
        for name, old in before.items():
            if execution.values.get(name) is not old:
                self._store.free(old)


def watching(network: Network, layer: str, take: Callable[..., None]) -> tuple[str, Watchers]:
    """The node up to which a network has to run for what a layer reads, and who watches until then: `take` is called
    with that once for each batch.
    """
    names = network.graph.by_name[layer].operands
    last = max(names.values(), key=network.graph.index.__getitem__)
    if len(names) == 1:
        return last, {last: take}
    seen: dict[str, Tensor] = {}

    def watch(key: str, value: Tensor) -> None:
        seen[key] = value
        if len(seen) == len(names):
            own = dict(seen)
            seen.clear()
            take(**own)

    return last, {name: partial(watch, key) for key, name in names.items()}
