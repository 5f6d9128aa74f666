"""Compares a float and a quantized network on the same batches, tensor by tensor. Both run a
batch in step, so that each pair of values is compared while it exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from quantizer.calibration.memory_prediction import (
    MOST_BATCHES_IN_STEP,
    MOST_BYTES_IN_STEP,
    bytes_in_step,
)
from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import ComparedNetworks, require_same_shape
from quantizer.comparison.output_figures import leaves
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.distributed import ALONE, Ranks, merge_in_batch_order
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison, empty_effects
from quantizer.graph.channels.output_parts import Output
from quantizer.layerwise.sequential_runner import half_of_what_is_free, no_batches
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.recorded_outputs import RecordedOutputs, digest_of
from quantizer.nn.segments import deferred_weights, segments, total_bytes
from quantizer.numerics.metrics import Approximation
from quantizer.plan.readers import useful_magnitude
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import CPU, keep_loaded, loaded

_BATCHES_BETWEEN_EXCHANGES = 16
"""After so many batches of each rank, the ranks exchange their results."""
_Taps = dict[str, list[tuple[TensorQuantizer, int, float]]]
"""For each node whose value is quantized, its quantizers. Each has the index of its
`LayerNoise` in a list, and the magnitude beyond which the node's readers saturate.
"""


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
    follow: Callable[[str], None] = lambda _: None,
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
        follow: called with how far a group of batches is, such as "8 of 12 layers".

    Raises:
        DataError: there is no batch, or an output of the float network is not finite.
        ModelError: a tensor has different shapes in the two networks.
        RankError: the ranks do not have the same batches.
    """
    compared = ComparedNetworks(reference, user, outputs)
    pair = _NetworkPair(reference, quantized, compared, recorded)
    runs = _GroupedRuns(pair, follow)
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

    def __init__(self, pair: _NetworkPair, follow: Callable[[str], None]) -> None:
        self.results: list[NetworkComparison] = []
        self._pair = pair
        self._follow = follow
        self._segments = segments([pair.reference, pair.quantized])
        self._batches: list[Batch] = []
        self._runs: dict[int, _PairedRun] = {}
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
            self._runs[number] = _PairedRun(self._pair, batch)
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
            if segment.stop < len(nodes):
                self._follow(f"{segment.stop} of {len(nodes)} layers")

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


class _NetworkPair:
    """A float and a quantized network that are compared.

    Args:
        reference: the float network, with the nodes of the quantized one.
        quantized: the network that is compared with it.
        outputs: compares their outputs.
        recorded: keeps the outputs of the quantized network; None if nothing will need them.

    Attributes:
        taps: the quantizers of activations.
    """

    def __init__(
        self,
        reference: Network,
        quantized: Network,
        outputs: ComparedNetworks,
        recorded: RecordedOutputs | None,
    ) -> None:
        self.reference = reference
        self.quantized = quantized
        self.outputs = outputs
        self.recorded = recorded
        self._no_noise, self.taps = _taps(quantized)
        self._inputs = empty_effects(quantized)

    def empty(self) -> NetworkComparison:
        """Return a comparison without a batch."""
        layers = deepcopy(self._no_noise)
        return NetworkComparison(layers, *self.outputs.empty(), inputs=list(self._inputs))


class _PairedRun:
    """One batch that both networks run in step.

    Args:
        pair: the networks.
        batch: of data, on their device.
    """

    def __init__(self, pair: _NetworkPair, batch: Batch) -> None:
        self._pair = pair
        self._batch = batch
        self._result = pair.empty()
        self._float_run = pair.reference.start(batch.args, batch.kwargs)
        self._quantized_run = pair.quantized.start(batch.args, batch.kwargs)
        self._recorders = pair.outputs.recorders()
        self._digest: bytes | None = None
        if pair.recorded is not None:
            self._digest = digest_of(self._quantized_run.values.values())

    def advance(self, stop: int) -> None:
        """Run the nodes before index `stop` in both networks, and compare their values."""
        left, right = self._recorders
        while self._float_run.position < stop:
            name, x = self._float_run.step()
            _, y = self._quantized_run.step()
            left.see(name, x)
            right.see(name, y)
            self._see_input(name, x, y)
            for quantizer, index, most in self._pair.taps.get(name, ()):
                require_same_shape(name, x, y)
                noise = self._result.layers[index]
                expected = _clipped(x, most)
                actual = _clipped(y, most)
                # The cosine is that of the whole network
                local = _quantized(quantizer, expected, is_measured=False)
                accumulated = Approximation(actual)
                if noise.layer != name:
                    # The quantized network has not applied a quantizer of a layer's input yet
                    accumulated = _quantized(quantizer, actual)
                noise.add(expected, local, accumulated)

    def _see_input(self, name: str, x: object, y: object) -> None:
        """Add the values of a node to the effects of the channels that layers read from it."""
        rows = self._result.inputs
        for index, row in enumerate(rows):
            if row.source != name:
                continue
            expected = cast(Tensor, x)
            actual = cast(Tensor, y)
            rows[index] = row.with_batch(expected, actual)

    def finish(self) -> NetworkComparison:
        """Return the comparison of the batch, whose nodes have all run."""
        result = self._result
        executions = (self._float_run, self._quantized_run)
        expected, result.outputs, result.quantization = self._pair.outputs.figures(
            executions, self._recorders, self._batch
        )
        record_predictions(result, self._batch, expected, self._quantized_run.outputs())
        if self._pair.recorded is not None:
            self._pair.recorded.record(self._digest, self._quantized_run.output())
        return result


def _clipped(values: Tensor, most: float) -> Tensor:
    """Return the values clipped to magnitudes of at most `most`, which may be infinite."""
    if math.isinf(most):
        return values
    return values.clamp(-most, most)


def _quantized(
    quantizer: TensorQuantizer, values: Tensor, *, is_measured: bool = True
) -> Approximation:
    """Return what a quantizer makes of some values."""
    if quantizer.is_elementwise:
        return Approximation(values, quantizer.quantized_copy, is_measured)
    return Approximation(quantizer.quantized_copy(values), None, is_measured)


def _taps(quantized: Network) -> tuple[list[LayerNoise], _Taps]:
    """Return an empty `LayerNoise` for each activation that a network quantizes, and the nodes
    that have the values.
    """
    rows: list[LayerNoise] = []
    taps: _Taps = {}
    for name, role, quantizer in quantized.quantizers():
        if is_parameter(role):
            continue
        node = quantized.graph.by_name[name]
        source = name
        if role != "activation" and node.op != "input":
            # The input of a layer is the value of another node
            source = node.input_roles()[role]
        most = useful_magnitude(quantized.graph, source, quantizer.spec)
        if most is None:
            most = math.inf
        tap = (quantizer, len(rows), most)
        taps.setdefault(source, []).append(tap)
        is_bounded = node.row.kind == "nonlinear"
        row = LayerNoise(name, role, accumulated=Noise(), is_bounded=is_bounded)
        rows.append(row)
    return rows, taps


def record_predictions(
    result: NetworkComparison,
    batch: Batch,
    reference: Sequence[Tensor],
    quantized: Sequence[Tensor],
) -> None:
    """Record three things about one batch: whether the quantized outputs are finite, whether
    both networks rank the same class first, and how well they predict the targets.

    Classes and predictions are those of the first floating-point output.
    """
    result.batches = 1
    for part in leaves(result.outputs):
        if part.is_float and not math.isfinite(part.noise.error):
            result.spoiled = 0
    pairs = list(zip(reference, quantized, strict=True))
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if not floats:
        result.rankable = False
        return
    x, y = floats[0]
    is_ranking = x.dim() == 2 and x.shape[1] > 1
    result.rankable &= is_ranking
    if is_ranking:
        classes = x.argmax(1)
        result.samples += len(classes)
        is_same = classes == y.argmax(1)
        result.agreeing += int(is_same.sum())
    target = batch.target
    is_index = target is not None and not target.is_floating_point()
    if is_index and (is_ranking or x.dim() == 3):
        result.float_score.add(x, batch)
        result.quantized_score.add(y, batch)
