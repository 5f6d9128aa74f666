"""Runs a network over all batches segment by segment or node by node, so that layers change
before values go on.

Between segments it keeps what later nodes read, of every batch; within one it runs batch by
batch, as a plain pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.execution import NOBODY, Execution, Watchers, arguments
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch, naming, naming_batch, not_finite
from quantizer.storage.allocator import GROWTH, give_back
from quantizer.storage.deferred_tensor import loaded

IDS = 1024
"""So many token ids run as one batch."""
_Numbered = tuple[int, list[Any]]
"""The number of a batch, and what it gives the network."""


class _Run(NamedTuple):
    """Batches that run as one, and how far they are."""

    parts: list[_Numbered]
    execution: Execution

    @staticmethod
    def of(parts: list[_Numbered], network: Network, store: ActivationStore) -> _Run:
        """Before the first node. The inputs of several batches are kept, as they are small;
        that of one is not.
        """
        run = Execution(network, [store.keep(value) for value in _joined(parts)])
        return _Run(parts if len(parts) > 1 else [(parts[0][0], [])], run)


class SequentialRunner:
    """The executions of all batches, at the same node. Going through all nodes costs what one
    pass over the data costs.

    Segment by segment: `advance` as far as a node, change layers that come after it, go on.
    Node by node, in order: `compute(node)` gives its value for each batch and `keep`s them,
    `release` goes on to the next node; `done` is all three. Memory holds the batches' inputs
    and what is alive: between two blocks, their common value and what all blocks read. Of
    several ranks each runs its own share of the batches.

    Args:
        network: what runs.
        batches: what it runs on.
        store: keeps the values; without one, half of what is free does.
        ranks: who share the batches.
        together: whether consecutive batches of few token ids run as one, as of few tokens it
            is calls that cost; their values come as one, too.

    Raises:
        DataError: there is no batch, or one does not fit the network; it is named by its
            number.
    """

    def __init__(
        self,
        network: Network,
        batches: Iterable[Batch],
        store: ActivationStore | None = None,
        ranks: Ranks = ALONE,
        *,
        together: bool = False,
    ) -> None:
        self.network, self.ranks = network, ranks
        self._store, numbered = store or ActivationStore(), self._inputs(batches)
        parted = (
            _parted(numbered)
            if together and _reads_ids(network)
            else ([row] for row in numbered)
        )
        self._runs = [_Run.of(parts, network, self._store) for parts in parted]

    def _inputs(self, batches: Iterable[Batch]) -> Iterator[_Numbered]:
        """What this rank's batches give the network."""
        count = 0
        for count, batch in enumerate(batches, 1):
            if self.ranks.owns(count - 1):
                # The runner keeps the inputs of all batches, and a loader may refill those of
                # the last one.
                stable = batch.stable()
                with naming_batch(count - 1):
                    inputs = self.network.inputs(stable.args, stable.kwargs)
                yield count - 1, inputs
        if not count:
            raise no_batches()

    def value(self, name: str) -> list[Any]:
        """A node's value for each batch, while a later node reads it."""
        return [run.execution.values[name] for run in self._runs]

    def branch(self) -> SequentialRunner:
        """Another runner that goes on from here with the same network, while this one stays
        where it is.
        """
        other = copy.copy(self)
        other._store = ActivationStore(self._store.budget)
        other._runs = [_Run(run.parts, run.execution.branch()) for run in self._runs]
        return other

    def advance(self, upto: str | None = None, watch: Watchers = NOBODY) -> None:
        """Run all batches up to and with node `upto`, or to the end; values of watched nodes
        are shown as they come, of those that ran before first.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        index = self.network.graph.index
        stop = len(index) if upto is None else index[upto] + 1
        for run in self._runs:
            execution = run.execution
            before, position = dict(execution.values), execution.position
            with self._naming(run, stop, watch), torch.no_grad():
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
        return [arguments(node, run.execution.values) for run in self._runs]

    def compute(self, node: Node) -> Iterator[Any]:
        """The next node's value of each batch, as its layer is now.

        Raises:
            DataError: its layer cannot run on a batch; both are named.
        """
        for run in self._runs:
            with self._naming(run, self.network.graph.index[node.name] + 1):
                value = self.network.run_node(node, run.execution.values)
            yield value

    def keep(self, values: Iterable[Any]) -> list[Any]:
        """Keep the next node's value of each batch, one by one as they come."""
        return [self._store.keep(value) for value in values]

    def change(self, kept: list[Any], changed: Callable[[Any], Any]) -> None:
        """Put in place of each value that `keep` has kept what is made of it, which may be
        itself, changed in place.
        """
        for number, value in enumerate(kept):
            made = changed(loaded(value))
            if made is not value:
                self._store.free(value)
                kept[number] = self._store.keep(made)

    def release(self, kept: Iterable[Any]) -> None:
        """Go on to the next node with these values, which `keep` has kept, and free what
        nothing reads any more.
        """
        for run, value in zip(self._runs, kept, strict=True):
            before = dict(run.execution.values)
            run.execution.put(value)
            self._free(before, run.execution)
        give_back(GROWTH)

    def done(self, node: Node) -> None:
        """Compute the next node, keep its values, and go on to the one after it."""
        self.release(self.keep(self.compute(node)))

    def outputs(self) -> Iterator[Any]:
        """What the network returns for each batch, once every node is done."""
        return (run.execution.output() for run in self._runs)

    @contextmanager
    def _naming(self, run: _Run, stop: int, watch: Watchers = NOBODY) -> Iterator[None]:
        """A DataError from within begins with the batch, which of several is the first that has
        one alone.
        """
        try:
            yield
        except DataError as error:
            numbers = [number for number, _ in run.parts]
            if len(numbers) > 1:
                watch = dict.fromkeys(watch, partial(_refuse, error))
                for number, inputs in run.parts:
                    with naming_batch(number):
                        Execution(self.network, inputs).advance(stop, watch)
            place = (
                f"batch {numbers[0]}"
                if len(numbers) == 1
                else f"batches {numbers[0]} to {numbers[-1]}"
            )
            with naming(f"{place}: "):
                raise

    def _free(self, before: dict[str, Any], execution: Execution) -> None:
        for name, old in before.items():
            if execution.values.get(name) is not old:
                self._store.free(old)


def no_batches() -> DataError:
    """Return the error about a pass over calibration data without any."""
    return DataError(
        "the calibration data has no batches", help="check --data and --subset_len"
    )


def _parted(batches: Iterable[_Numbered]) -> Iterator[list[_Numbered]]:
    """Consecutive batches of one length, of `IDS` ids together."""
    parts, room, lengths = list[_Numbered](), 0, list[Any]()
    for number, inputs in batches:
        size, own = (
            max(value.numel() for value in inputs),
            [value.shape[1:] for value in inputs],
        )
        if parts and (size > room or own != lengths):
            yield parts
            parts = []
        room, lengths = (room if parts else IDS) - size, own
        parts.append((number, inputs))
    if parts:
        yield parts


def _reads_ids(network: Network) -> bool:
    """Whether all inputs are integers, with samples along the first axis, of which there may be
    any number.
    """
    nodes = [node for node in network.graph.nodes if node.op == "input"]
    return all(node.shape and node.shape[0] is None and not node.is_float for node in nodes)


def _refuse(error: DataError, value: Tensor) -> None:
    """Raise the error that a value of several batches had, if this one is not finite."""
    if not_finite(value):
        raise error


def _joined(parts: Sequence[_Numbered]) -> list[Any]:
    """The inputs of batches, one after the other in one."""
    first, *others = (inputs for _, inputs in parts)
    return (
        [torch.cat(values) for values in zip(first, *others, strict=True)] if others else first
    )


def watching(network: Network, layer: str, take: Callable[..., None]) -> tuple[str, Watchers]:
    """The node up to which a network has to run for what a layer reads, and who watches until
    then: `take` is called with that once for each batch.
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
