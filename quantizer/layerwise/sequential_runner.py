"""Run a network over all batches segment by segment or node by node, so that layers can change
before values continue.

Between segments, the values that later nodes read are stored, of every batch. Within a segment
it runs batch by batch, as a plain pass does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.graph.ir import Graph, Node
from quantizer.nn.network import (
    NO_WATCHERS,
    Execution,
    Network,
    Watchers,
    deferred_tensors,
    layer_arguments,
)
from quantizer.sources.batches import Batch, prefix_batch_errors, prefix_errors
from quantizer.storage import process_memory
from quantizer.storage.deferred_tensor import CPU, DeferredTensor, Spool, keep_loaded, loaded
from quantizer.storage.process_memory import TRIM_AFTER_GROWTH, trim_heap

_IDS = 1024
_IDS_OF_A_DEVICE = 8192
"""Up to this many token ids run as one batch: on the CPU, and elsewhere."""
_NumberedInputs = tuple[int, list[Any]]
"""The number of a batch, and what it gives the network."""


class _Run(NamedTuple):
    """Holds batches that run as one, by their numbers, and how far they are."""

    numbers: list[int]
    execution: Execution


class SequentialRunner:
    """Holds the executions of all batches, at the same node. Going through all nodes costs what
    one pass over the data costs.

    Segment by segment: `advance` up to a node, change layers that come after it, advance again.
    Node by node, in order: `compute(node)` yields its value for each batch, `store` stores
    them, `release` continues with the next node; `finish` does all three. Memory holds the
    batches' inputs and the values that are still read. Between two blocks, these are their
    common value and what all blocks read. Of several ranks, each runs its own share of the
    batches.

    Args:
        network: what runs.
        batches: what it runs on.
        store: for the values; without one, half of the free memory is used.
        ranks: who share the batches.
        together: whether consecutive batches of few token ids run as one, because a call costs
            more than a few tokens. Their values come as one, too.
        first: how many batches are read at once; None for all. `read_more` reads others.

    Attributes:
        batches: how many were read, of all ranks together.
        samples: how many these batches hold.

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
        first: int | None = None,
    ) -> None:
        self.network = network
        self.ranks = ranks
        self.batches = 0
        self.samples = 0
        self._store = store or ActivationStore()
        self._unread = iter(batches)
        numbered = self._inputs(first)
        runs: Iterable[list[_NumberedInputs]] = ([row] for row in numbered)
        if together:
            runs = _joined(network.graph, numbered)
        self._runs = [self._start(parts) for parts in runs]
        if not self.batches:
            raise no_batches()

    def _inputs(self, count: int | None) -> Iterator[_NumberedInputs]:
        """Yield what this rank's share of the next `count` batches gives the network."""
        for batch in islice(self._unread, count):
            number = self.batches
            self.batches += 1
            self.samples += batch.size
            if self.ranks.owns(number):
                # All inputs are stored, and a loader may refill those of the last batch
                stable = batch.stable()
                with prefix_batch_errors(number, batch):
                    inputs = self.network.inputs(stable.args, stable.kwargs)
                shown_number = number if batch.number is None else batch.number
                yield shown_number, inputs

    def _start(self, parts: list[_NumberedInputs]) -> _Run:
        """Return the run of batches that run as one, before its first node."""
        all_inputs = [inputs for _, inputs in parts]
        joined = all_inputs[0]
        if len(parts) > 1:
            joined = [torch.cat(values) for values in zip(*all_inputs, strict=True)]
        kept = [self._store.keep(value) for value in joined]
        return _Run([number for number, _ in parts], Execution(self.network, kept))

    def read_more(self, count: int, upto: Node) -> bool:
        """Read up to `count` more batches, and run them up to the node before `upto`, with the
        present layers. Return whether there was one, on any rank.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        before = self.batches
        stop = self.network.graph.index[upto.name]
        for numbered in self._inputs(count):
            run = self._start([numbered])
            self._advance(run, stop, NO_WATCHERS)
            self._runs.append(run)
        return self.batches > before

    def value(self, name: str) -> list[Any]:
        """Return a node's value for each batch, while a later node reads it."""
        return [run.execution.values[name] for run in self._runs]

    def branch(self) -> SequentialRunner:
        """Return another runner that continues from here with the same network, while this one
        stays where it is.
        """
        other = copy.copy(self)
        other._store = ActivationStore(self._store.budget)
        other._runs = [_Run(run.numbers, run.execution.branch()) for run in self._runs]
        return other

    def advance(self, upto: str | None = None, watch: Watchers = NO_WATCHERS) -> None:
        """Run all batches up to and including node `upto`, or to the end.

        Watchers get the values of their nodes as they come, after those of nodes that ran
        earlier.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        index = self.network.graph.index
        stop = len(index) if upto is None else index[upto] + 1
        with self._held_weights(stop):
            for run in self._runs:
                self._advance(run, stop, watch)

    def _advance(self, run: _Run, stop: int, watch: Watchers) -> None:
        """Run a batch up to the node before number `stop`, and store its values."""
        index = self.network.graph.index
        execution = run.execution
        before = dict(execution.values)
        position = execution.position
        with _naming(run), torch.no_grad():
            for name in watch:
                if index[name] < position:
                    watch[name](execution.values[name])
            execution.advance(stop, watch)
        self._free(before, execution)
        for name, value in execution.values.items():
            if before.get(name) is not value:
                execution.values[name] = self._store.keep(value)
        trim_heap(TRIM_AFTER_GROWTH)

    def calls(self, node: Node) -> list[dict[str, Any]]:
        """Return the arguments of the next node's layer, batch by batch."""
        return [layer_arguments(node, run.execution.values) for run in self._runs]

    def compute(self, node: Node, start: int = 0) -> Iterator[Any]:
        """Yield the next node's value of each batch from number `start` of this rank's on,
        computed with the present layer.

        Raises:
            DataError: its layer cannot run on a batch; both are named.
        """
        stop = self.network.graph.index[node.name] + 1
        with self._held_weights(stop):
            for run in self._runs[start:]:
                with _naming(run):
                    value = self.network.run_node(node, run.execution.values)
                yield value

    def store(self, values: Iterable[Any]) -> list[Any]:
        """Store the next node's value of each batch, one by one as they come."""
        return [self._store.keep(value) for value in values]

    def change(self, stored: list[Any], changed: Callable[[Any], Any]) -> None:
        """Replace each stored value by what `changed` returns, which may be the value itself,
        changed in place.
        """
        for number, value in enumerate(stored):
            new = changed(loaded(value))
            if new is not value:
                self._store.free(value)
                stored[number] = self._store.keep(new)

    def release(self, stored: Iterable[Any]) -> None:
        """Move to the next node with these stored values, and free values without readers."""
        for run, value in zip(self._runs, stored, strict=True):
            before = dict(run.execution.values)
            run.execution.put(value)
            self._free(before, run.execution)
        trim_heap(TRIM_AFTER_GROWTH)

    def finish(self, node: Node) -> None:
        """Compute the next node, store its values, and continue with the one after it."""
        self.release(self.store(self.compute(node)))

    def outputs(self) -> Iterator[Any]:
        """Yield what the network returns for each batch, once every node has run."""
        for run in self._runs:
            yield run.execution.output()

    def _held_weights(self, stop: int) -> AbstractContextManager[None]:
        """Keep the weights of the nodes up to `stop` on the device, if there is room, so that
        each comes from its file once and not for every batch. On the CPU a file's pages stay in
        memory anyway.
        """
        graph = self.network.graph
        if graph.device == CPU or len(self._runs) < 2:
            return keep_loaded([])
        start = self._runs[0].execution.position
        weights = []
        for node in graph.nodes[start:stop]:
            weights += deferred_tensors(self.network.layers[node.name])
        size = sum(tensor.nbytes for tensor in weights)
        if size > half_of_what_is_free(graph.device):
            return keep_loaded([])
        return keep_loaded(weights)

    def _free(self, before: dict[str, Any], execution: Execution) -> None:
        for name, value in before.items():
            if execution.values.get(name) is not value:
                self._store.free(value)


def _naming(run: _Run) -> AbstractContextManager[None]:
    """Begin a DataError from within with the batch, or with those that run as one."""
    first = run.numbers[0]
    last = run.numbers[-1]
    place = f"batch {first}" if first == last else f"batches {first} to {last}"
    return prefix_errors(f"{place}: ")


def _joined(
    graph: Graph, batches: Iterable[_NumberedInputs]
) -> Iterator[list[_NumberedInputs]]:
    """Yield consecutive batches of token ids of one length, of few ids together. Other batches
    are yielded one by one.
    """
    if not _reads_ids(graph):
        for row in batches:
            yield [row]
        return
    most = _IDS if graph.device == CPU else _IDS_OF_A_DEVICE
    parts: list[_NumberedInputs] = []
    room = 0
    lengths: list[Any] = []
    for number, inputs in batches:
        size = max(value.numel() for value in inputs)
        new_lengths = [value.shape[1:] for value in inputs]
        if parts and (size > room or new_lengths != lengths):
            yield parts
            parts = []
        if not parts:
            room = most
            lengths = new_lengths
        room -= size
        parts.append((number, inputs))
    if parts:
        yield parts


def _reads_ids(graph: Graph) -> bool:
    """Check whether all inputs are integers whose first axis is the batch, of any size."""
    nodes = [node for node in graph.nodes if node.op == "input"]
    return all(node.shape and node.shape[0] is None and not node.is_float for node in nodes)


def no_batches(purpose: str = "calibration") -> DataError:
    """Return the error about data for this purpose without any batch."""
    text = f"the {purpose} data has no batches"
    return DataError(text, help="check <--data> and <--subset_len>")


_BYTES_IF_UNKNOWN = 2 << 30
"""The budget where the system does not say what is free."""


def half_of_what_is_free(device: torch.device = CPU) -> int:
    """Return the default budget for what is on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    free = process_memory.available_bytes()
    return _BYTES_IF_UNKNOWN if free is None else free // 2


class ActivationStore:
    """Keeps nested values. Tensors beyond `budget` bytes are read from a file whenever they are
    needed, and put on their device again.

    Each device has a budget of its own. Without one it is half of what is free there. A view
    counts as memory of its own.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._left: dict[torch.device, int] = {}
        self._spool = Spool()

    def keep(self, value: Any) -> Any:
        """Return the same value, with its tensors where they fit. The caller uses this one from
        now on.

        Raises:
            DataError: there is no room for the files.
        """
        return pytree.tree_map(self._keep, value)

    def free(self, value: Any) -> None:
        """Give back the memory of a value that is no longer used."""
        for leaf in pytree.tree_leaves(value):
            is_in_memory = isinstance(leaf, Tensor) and not isinstance(leaf, DeferredTensor)
            if is_in_memory and leaf.device in self._left:
                self._left[leaf.device] += leaf.nbytes

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DeferredTensor):
            return leaf
        device = leaf.device
        if device not in self._left:
            budget = half_of_what_is_free(device) if self.budget is None else self.budget
            self._left[device] = budget
        if leaf.nbytes > self._left[device] and leaf.numel():
            return self._spool.put(leaf).on_device(device)
        self._left[device] -= leaf.nbytes
        return leaf
