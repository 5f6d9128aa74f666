"""Run GPTQ, GPTAQ and Qronos on a network, one group of layers after the other.

The layers of a group read one value x. For each group, the network runs up to that value, the
products x x^T are summed up, and the group's weights are rounded. `layers` does the rounding,
and `target` has the differences between the three.

Source: Frantar et al. 2022, "GPTQ" (arXiv 2210.17323); Li et al. 2025, "GPTAQ" (arXiv
2504.02692); Zhang et al. 2025, "Qronos" (arXiv 2505.11695).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantizer.algorithms.gptq.experts import round_experts
from quantizer.algorithms.gptq.guidance import TokenWeights, token_weights, unguided_remarks
from quantizer.algorithms.gptq.layers import RoundedLayers, round_layers
from quantizer.algorithms.gptq.settings import GPTAQConfig, GPTQConfig, QronosConfig
from quantizer.algorithms.gptq.target import (
    GptaqTarget,
    GptqTarget,
    Member,
    Products,
    QronosTarget,
)
from quantizer.distributed import Ranks
from quantizer.graph.ir import Graph
from quantizer.graph.structure.definitions import InputGroup
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.layerwise.adjustment import Adjustment, Remark, Task, apply_adjustment
from quantizer.layerwise.gram import (
    DEEPEST,
    TOO_DEEP,
    UNREACHED,
    Drift,
    Gram,
    deepest,
    geometry,
    not_finite_input,
    quantized_layers,
    watching,
)
from quantizer.layerwise.round_to_nearest import (
    nearest,
    nearest_qparams,
    steps_before_rounding,
    super_block_remarks,
)
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.nn import ExpertLinear
from quantizer.nn.network import Network
from quantizer.observers import ObservationError
from quantizer.storage.deferred_tensor import keep_loaded

_NumberedGroup = tuple[int, InputGroup]
"""A group of layers, and its number in execution order."""


def gptq(task: Task, settings: GPTQConfig, adjustment: Adjustment) -> Adjustment:
    """Round the weights that the plan quantizes, with the scales of their ranges or with those
    that an earlier algorithm found.

    Layers go in execution order, on inputs from a network whose earlier layers are rounded.
    Inputs are not quantized, even if the plan quantizes them. Without `true_sequential`, the
    layers of a block are rounded on their inputs in the float block. Columns of zeros stay at
    round-to-nearest, and so do layers that no token reached or whose outputs on the calibration
    data would be worse. Notes name them.

    Raises:
        DataError: a value in the network is not finite; layer and batch are named.
    """
    return _round_in_order(task, adjustment, GptqTarget(settings))


def gptaq(task: Task, settings: GPTAQConfig, adjustment: Adjustment) -> Adjustment:
    """Round like `gptq`, toward the outputs of the float network on its own inputs.

    The float network runs with the rounded one. The reported errors are those against the
    target weight, which stands for these outputs on the rounded network's inputs.
    """
    return _round_in_order(task, adjustment, GptaqTarget(settings))


def qronos(task: Task, settings: QronosConfig, adjustment: Adjustment) -> Adjustment:
    """Round like `gptaq`, with another target."""
    return _round_in_order(task, adjustment, QronosTarget(settings))


def _round_in_order(task: Task, adjustment: Adjustment, target: GptqTarget) -> Adjustment:
    """Round group after group, or all groups of a block at once without `true_sequential`."""
    if not task.done:
        adjustment = adjustment.with_remarks(*super_block_remarks(task))
    rounding = _SequentialRounding(task, adjustment, target)
    numbered_groups = enumerate(task.structure.groups)
    by_block = itertools.groupby(numbered_groups, lambda numbered: numbered[1].block)
    for block, block_groups in by_block:
        if target.settings.true_sequential or block is None:
            for numbered_group in block_groups:
                rounding.process([numbered_group])
        else:
            rounding.process([*block_groups])
    return rounding.adjustment


@dataclass(frozen=True)
class _GatheredLayers:
    """Holds layers that multiply the same patches of one value, and the sums over these.

    Attributes:
        names: the layers.
        gram: the sum of x x^T, with x in the quantized network.
        drift: the sum of (f - x) x^T, with f in the float network; None if the target does not
            need it.
    """

    names: list[str]
    gram: Gram
    drift: Drift | None

    def cost(self, network: Network) -> float:
        """Estimate how long rounding takes, as rows times depth squared."""
        depth = deepest(network, self.names)
        weights = [network.layers[name].get_parameter("weight") for name in self.names]
        return float(depth * sum(weight.numel() for weight in weights))

    def merge(self, ranks: Ranks, to: int) -> None:
        """Add up the sums of all ranks, at rank `to`."""
        self.gram.merge(ranks, to)
        if self.drift is not None:
            self.drift.merge(ranks, to)

    def products(self) -> list[Products]:
        """Return the sums of each group of a convolution, or of each expert."""
        grams = self.gram.matrix
        if self.drift is None:
            return [Products(gram) for gram in grams]
        pairs = zip(grams, self.drift.matrix, strict=True)
        return [Products(gram, drift) for gram, drift in pairs]


class _SequentialRounding:
    """Rounds a network in order, together with the float one if the target needs that."""

    def __init__(self, task: Task, adjustment: Adjustment, target: GptqTarget) -> None:
        self.task = task
        self.adjustment = adjustment
        self.target = target
        graph = apply_adjustment(task.graph, adjustment)
        # By value: float32 [tokens]
        self.guidance: dict[str, Tensor] = {}
        if target.settings.guidance:
            float_network = Network(graph)
            self.guidance = token_weights(float_network, task, target.settings.guidance)
            if not task.done:
                remarks = unguided_remarks(float_network, task)
                self.adjustment = adjustment.with_remarks(*remarks)
        store = ActivationStore(task.memory)
        self.runner = self._runner(graph, store)
        self.float_runner: SequentialRunner | None = None
        if target.needs_float:
            self.float_runner = self._runner(graph, store)
        to_round: set[str] = set()
        for group in task.structure.groups:
            to_round.update(quantized_layers(task, group))
        for name, rounded in adjustment.rounded.items():
            if name not in to_round:
                self._set_weight(name, rounded.weight)

    def _runner(self, graph: Graph, store: ActivationStore) -> SequentialRunner:
        batches = self.task.batches()
        return SequentialRunner(
            Network(graph), batches, store, ranks=self.task.ranks, together=True
        )

    def process(self, chunk: Sequence[_NumberedGroup]) -> None:
        """Sum up the inputs of all these groups, and then round their layers.

        Groups that were rounded before an interruption get their weights from the adjustment.
        """
        pending = [number for number, _ in chunk if number >= self.task.done]
        gathered: list[tuple[int, _GatheredLayers]] = []
        runner = self.runner
        for number, group in chunk:
            if number not in pending:
                continue
            if number != pending[0] and runner is self.runner:
                # The runner stays at the first group, and goes on from there with rounded ones
                runner = self.runner.branch()
            for layers in self._gather(runner, quantized_layers(self.task, group)):
                gathered.append((number, layers))
        results = self._solve_all(gathered)
        for number, group in chunk:
            for result in results.get(number, ()):
                self.adjustment = self.adjustment.with_rounded(result.layers)
                self.adjustment = self.adjustment.with_remarks(*result.remarks)
            for name in quantized_layers(self.task, group):
                self._set_weight(name, self._quantized_weight(name))
            if number in pending:
                self.task.after_group(self.adjustment, number + 1)

    def _gather(self, runner: SequentialRunner, names: Sequence[str]) -> list[_GatheredLayers]:
        """Run up to the values that the layers read, and sum up their products.

        Layers that are too deep get a note, and are left out.
        """
        network = runner.network
        # Layers with the same inputs and geometry multiply the same patches
        by_patches: dict[tuple[Any, ...], list[str]] = {}
        for name in names:
            sources = network.graph.by_name[name].operands.values()
            patches = (*sources, *geometry(network.layers[name]))
            by_patches.setdefault(patches, []).append(name)
        gathered = []
        for alike in by_patches.values():
            first_name = alike[0]
            if deepest(network, [first_name]) > DEEPEST:
                remarks = [Remark(name, TOO_DEEP) for name in alike]
                self.adjustment = self.adjustment.with_remarks(*remarks)
                continue
            layer = network.layers[first_name]
            drift = Drift(layer) if self.float_runner else None
            layers = _GatheredLayers(alike, Gram(layer), drift)
            last_node, watchers = watching(network, first_name, self._watcher(layers))
            runner.advance(last_node, watchers)
            gathered.append(layers)
        return gathered

    def _watcher(self, gathered: _GatheredLayers) -> Callable[..., None]:
        """Return a function that adds a layer's input to the sums, batch by batch.

        For the drift, it reads the same batch of the float network. Experts have no drift,
        because the float network routes other tokens to them.
        """
        float_values: Iterator[Any] = iter(())
        weights: TokenWeights | None = None
        network = self.runner.network
        if not gathered.gram.is_routed:
            first_name = gathered.names[0]
            [source] = network.graph.by_name[first_name].operands.values()
            is_linear = isinstance(network.layers[first_name], nn.Linear)
            if is_linear and source in self.guidance:
                weights = TokenWeights(self.guidance[source])
            if self.float_runner is not None:
                self.float_runner.advance(source)
                float_values = iter(self.float_runner.value(source))

        def watch(input: Tensor, **routing: Tensor) -> None:  # noqa: A002 - as layers name it
            """Add the inputs of a batch, [samples, ..., channels], to the sums of the group."""
            roots = None
            if weights is not None:
                roots = weights.next(input)
                input = input * roots  # noqa: A001
            try:
                gathered.gram.add(input, **routing)
            except ObservationError as error:
                raise not_finite_input(gathered.names[0], error) from error
            if gathered.drift is not None and not routing:
                float_value = next(float_values)
                if roots is not None:
                    float_value = float_value * roots
                gathered.drift.add(float_value, input)

        return watch

    def _solve_all(
        self, gathered: list[tuple[int, _GatheredLayers]]
    ) -> dict[int, list[RoundedLayers]]:
        """Round all layers, which are taken from the list. Return the results by group number.

        The rank that rounds layers is chosen by cost, and gets the sums of all ranks.
        """
        ranks = self.task.ranks
        owners = ranks.by_cost([layers.cost(self.runner.network) for _, layers in gathered])
        for (_, layers), owner in zip(gathered, owners, strict=True):
            layers.merge(ranks, owner)
        solved = []
        for owner in owners:
            # Popped, so that each sum is freed once its layers are solved
            number, layers = gathered.pop(0)
            result = RoundedLayers()
            if owner == ranks.rank:
                result = self._round(layers)
            solved.append((number, layers.names[0], result))
        # Only now, as a broadcast waits for its owner, and all ranks round at the same time
        results: dict[int, list[RoundedLayers]] = {}
        for (number, first_name, result), owner in zip(solved, owners, strict=True):
            result = ranks.broadcast(result, f"{first_name}, rounded", owner)
            results.setdefault(number, []).append(result)
        return results

    def _round(self, gathered: _GatheredLayers) -> RoundedLayers:
        """Round layers, whose weights are read once if they are on disk."""
        if gathered.gram.tokens == 0:
            return RoundedLayers({}, [Remark(name, UNREACHED) for name in gathered.names])
        layers = {name: self.runner.network.layers[name] for name in gathered.names}
        specs = {name: self.task.specs[name, "weights"] for name in gathered.names}
        fixed = self.adjustment.qparams
        # Either all layers that share one value are experts, or none is
        experts = {
            name: layer for name, layer in layers.items() if isinstance(layer, ExpertLinear)
        }
        products = gathered.products()
        with keep_loaded([layer.get_parameter("weight") for layer in layers.values()]):
            if experts:
                tokens = gathered.gram.by_group
                return round_experts(
                    experts, specs, fixed, products, tokens=tokens, target=self.target
                )
            steps = steps_before_rounding(self.task, self.adjustment, layers)
            members = []
            for name, layer in layers.items():
                step = steps.get(name)
                member = Member.of(name, layer, specs[name], fixed.get(name), shared_step=step)
                members.append(member)
            return round_layers(members, products, gathered.gram.tokens, self.target)

    def _quantized_weight(self, name: str) -> Tensor:
        """Return the rounded weight of a layer; to nearest, if the algorithm left it out."""
        if name in self.adjustment.rounded:
            return self.adjustment.rounded[name].weight
        spec = self.task.specs[name, "weights"]
        weight = self.runner.network.layers[name].get_parameter("weight")
        qparams = self.adjustment.qparams.get(name)
        if qparams is None:
            steps = steps_before_rounding(self.task, self.adjustment, [name])
            qparams = nearest_qparams(spec, weight, steps.get(name))
        return nearest(weight, spec, qparams)

    def _set_weight(self, name: str, weight: Tensor) -> None:
        set_parameter(self.runner.network.layers[name], "weight", weight)
