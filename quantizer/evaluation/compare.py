"""Compares a float and a quantized network on the same batches, tensor by tensor. Reads them in
several passes, which have to be alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.calibration.events import RunStage
from quantizer.calibration.memory_prediction import (
    MOST_BATCHES_IN_STEP,
    MOST_BYTES_IN_STEP,
    bytes_in_step,
)
from quantizer.comparison.output_comparison import ComparedNetworks
from quantizer.comparison.perplexity import Score
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.distributed import ALONE, Ranks, merge_in_batch_order
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison
from quantizer.evaluation.paired_run import NetworkPair, PairedRun
from quantizer.graph.channels.output_parts import Output
from quantizer.layerwise.sequential_runner import half_of_what_is_free, no_batches
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.recorded_outputs import RecordedOutputs
from quantizer.nn.segments import deferred_weights, segments, total_bytes
from quantizer.numerics.metrics import Approximation
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.sources.data import Batches
from quantizer.sources.user_data import RepeatedPasses
from quantizer.storage.deferred_tensor import CPU, keep_loaded, loaded

_BATCHES_BETWEEN_EXCHANGES = 16
"""After so many batches of each rank, the ranks exchange their results."""


def target_metrics(model: Callable[..., Any], batches: Iterable[Batch]) -> dict[str, float]:
    """Return top-1 accuracy of one model on labelled batches, or perplexity on text; nothing if
    the data has no targets.
    """
    score = Score()
    for batch in batches:
        outputs = pytree.tree_leaves(model(*batch.args, **batch.kwargs))
        if isinstance(outputs[0], Tensor):
            score.add(outputs[0], batch)
    return score.metrics()


def over_batches(
    batches: Iterable[Batch],
    run: Callable[[int, Batch], None],
    ranks: Ranks = ALONE,
    exchange: Callable[[int], None] = lambda count: None,
) -> None:
    """Call `run` with each batch of this rank's share, without gradients.

    Args:
        batches: of all ranks.
        run: called with the number of a batch and the batch.
        ranks: who share the batches.
        exchange: called by all ranks together, every few batches and at the end, with the
            number of batches so far.

    Raises:
        DataError: there is no batch.
    """
    count = 0
    with torch.no_grad():
        for count, batch in enumerate(batches, 1):
            if ranks.owns(count - 1):
                run(count - 1, batch)
            if count % (_BATCHES_BETWEEN_EXCHANGES * ranks.world_size) == 0:
                exchange(count)
        if not count:
            raise no_batches("evaluation")
        exchange(count)


def compare(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    ranks: Ranks = ALONE,
    *,
    user: Network | None = None,
    outputs: Sequence[Output] | None = None,
    recorded: RecordedOutputs | None = None,
) -> NetworkComparison:
    """Run both networks once on each batch, each rank on its share.

    Results are added up in the order of the batches, so they do not depend on the number of
    ranks.

    Args:
        reference: the float network, with the nodes of the quantized one.
        quantized: the network that is compared with it.
        batches: of data, on the networks' device.
        ranks: who share the batches.
        user: the user's model, for the outputs, if `reference` computes another function.
        outputs: the outputs that are compared; those of the graph if None.
        recorded: keeps the outputs of the quantized network, if they are needed again.

    Raises:
        DataError: there is no batch, or an output of the float network is not finite.
        ModelError: a tensor has different shapes in the two networks.
        RankError: the ranks do not have the same batches.
    """
    compared = ComparedNetworks(reference, user, outputs)
    pair = NetworkPair.of(reference, quantized, compared, recorded)
    runs = _GroupedRuns(pair)
    total = pair.empty()

    def exchange(count: int) -> None:
        """Merge the results of all ranks into the total, in the order of the batches."""
        runs.finish()
        gathered = ranks.gather(runs.results, f"the comparison of {count} batches")
        for result in merge_in_batch_order(gathered):
            total.merge(result)
        runs.results.clear()

    over_batches(batches, runs.add, ranks, exchange)
    inputs = [row.measured(reference, quantized) for row in total.inputs]
    return replace(total, layers=runs.parameters + total.layers, inputs=inputs)


class _GroupedRuns:
    """Runs batches in groups. All batches of a group run a segment of the networks before any
    batch runs the next segment. So each weight in a file is read once for the group.

    If no weight is in a file, each batch runs alone.

    Attributes:
        results: the comparisons of the batches that have run.
    """

    def __init__(self, pair: NetworkPair) -> None:
        self.results: list[NetworkComparison] = []
        self._pair = pair
        self._segments = segments([pair.reference, pair.quantized])
        self._batches: list[Batch] = []
        self._runs: dict[int, PairedRun] = {}
        self._parameters: dict[str, list[LayerNoise]] = {}

    def add(self, number: int, batch: Batch) -> None:
        """Add a batch, and run the group if no further batch fits into it.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        self._batches.append(batch)
        has_room = self._has_room()
        if has_room:
            # A loader may overwrite it when it reads the next one
            batch = batch.stable()
        with prefix_batch_errors(number):
            self._runs[number] = PairedRun(self._pair, batch)
        if not has_room:
            self.finish()

    def finish(self) -> None:
        """Run the batches that were added.

        Raises:
            DataError: a batch cannot run; it is named by its number.
        """
        runs = self._runs
        if not runs:
            return
        self._runs = {}
        self._batches = []
        nodes = self._pair.quantized.graph.nodes
        for segment in self._segments:
            with keep_loaded(segment.weights):
                for number in list(runs):
                    with prefix_batch_errors(number):
                        runs[number].advance(segment.stop)
                        if segment.stop == len(nodes):
                            # Its values are freed before the next batch gets there
                            self.results.append(runs.pop(number).finish())
                for node in nodes[segment.start : segment.stop]:
                    self._parameter_rows(node.name)

    @property
    def parameters(self) -> list[LayerNoise]:
        """Return the noise of weights and biases, which needs no data and is measured once."""
        rows = []
        for node in self._pair.quantized.graph.nodes:
            rows += self._parameter_rows(node.name)
        return rows

    def _parameter_rows(self, name: str) -> list[LayerNoise]:
        """Return the noise of a layer's parameters.

        A bias is compared with its own rounding, because bias correction changes it on purpose.
        """
        if name in self._parameters:
            return self._parameters[name]
        layer = self._pair.quantized.layers[name]
        float_layer = self._pair.reference.layers[name]
        rows = self._parameters[name] = []
        for role, module in layer.quantizers.items():
            if not is_parameter(role):
                continue
            quantizer = cast(TensorQuantizer, module)
            key = parameter_name(role)
            exact = loaded(float_layer.get_parameter(key))
            if base_role(role) == "bias":
                rounded = quantizer.quantized_copy(exact)
            else:
                rounded = loaded(layer.get_parameter(key))
            row = LayerNoise(name, role)
            row.add(exact, Approximation(rounded))
            rows.append(row)
        return rows

    def _has_room(self) -> bool:
        """Return whether the values of another batch fit into memory, if it is as large as the
        last one.
        """
        is_deferred = self._pair.quantized.graph.is_deferred
        if not is_deferred or len(self._batches) >= MOST_BATCHES_IN_STEP:
            return False
        sizes = [_largest_input(batch) for batch in self._batches]
        return sum(sizes) + sizes[-1] <= self._most_values

    @cached_property
    def _most_values(self) -> float:
        """Return how many values the inputs of all batches together may have."""
        graph = self._pair.quantized.graph
        budget = half_of_what_is_free(graph.device)
        if graph.device == CPU:
            budget = min(budget, MOST_BYTES_IN_STEP)
        samples = budget / max(1, bytes_in_step(graph, 1))
        largest = 1
        for node in graph.nodes:
            if node.op == "input" and node.shape is not None:
                sizes = [1 if size is None else size for size in node.shape]
                largest = max(largest, math.prod(sizes))
        return samples * largest


def _largest_input(batch: Batch) -> int:
    """Return how many values the largest input of a batch has."""
    return max(tensor.numel() for _, tensor in batch.tensors())


def keep_on_device(networks: Sequence[Network]) -> AbstractContextManager[None]:
    """Keep the weights of networks on their GPU inside the `with` block, if at most half of the
    free memory is enough. Then each weight is read and decoded once.
    """
    device = networks[0].graph.device
    if device == CPU:
        return keep_loaded([])
    weights = deferred_weights(networks)
    if total_bytes(weights) > half_of_what_is_free(device):
        return keep_loaded([])
    return keep_loaded(weights)


@dataclass
class FollowedBatches:
    """Batches on a device, whose first pass a stage counts."""

    batches: Iterable[Batch]
    stage: RunStage
    device: torch.device | str = "cpu"
    passes: int = 0

    def __iter__(self) -> Iterator[Batch]:
        moved = (batch.to(self.device) for batch in self.batches)
        self.passes += 1
        return moved if self.passes > 1 else self.stage.counted(moved)


@dataclass(frozen=True)
class UserItems:
    """The items of the user's data, as `evaluate(model, data)` gets them."""

    batches: FollowedBatches

    def __iter__(self) -> Iterator[Any]:
        return (batch.raw for batch in self.batches)


def same_in_each_pass(batches: Batches) -> RepeatedPasses:
    """Require that all passes over some data give the same batches, from now on. Return what
    watches them.
    """
    if batches.passes is None:
        batches.passes = RepeatedPasses(batches.label)
    return batches.passes


def judged_on(batches: Batches) -> Mapping[str, Any]:
    """Return which samples were compared, as report.json has it, after a pass; empty if nothing
    is known of them.
    """
    if batches.passes is None or batches.fingerprint is None:
        return {}
    return batches.passes.judged_on(batches.fingerprint["samples"], batches.skip_len or 0)
