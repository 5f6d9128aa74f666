"""GPTQ and its kin: a network is gone through group by group; what a group reads is summed up,
and its layers rounded.

Knows no way of rounding; `round_layers` does. Where the three differ is in `gptq_target`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.adjustment import Adjustment, Remark, Task, adjusted
from quantizer.algorithms.gptq.experts import round_experts
from quantizer.algorithms.gptq.layers import Member, RoundedLayers, round_layers
from quantizer.algorithms.gptq.target import GptaqTarget, GptqTarget, Products, QronosTarget
from quantizer.algorithms.gram import (
    DEEPEST,
    UNREACHED,
    Drift,
    Gram,
    geometry,
    not_finite,
    quantized_layers,
)
from quantizer.algorithms.patches import weight_matrix
from quantizer.algorithms.round_to_nearest import nearest, nearest_qparams
from quantizer.algorithms.sequential_runner import SequentialRunner, watching
from quantizer.config.algorithms import GPTAQConfig, GPTQConfig, QronosConfig
from quantizer.distributed import Ranks
from quantizer.graph.ir import Graph
from quantizer.graph.parameters import set_parameter
from quantizer.graph.structure import InputGroup
from quantizer.nn import ExpertLinear
from quantizer.nn.network import Network
from quantizer.observers import ObservationError

TOO_DEEP = (
    f"it sums over more than {DEEPEST} inputs, too many for their Hessian; it stays at "
    "round-to-nearest"
)


def gptq(task: Task, settings: GPTQConfig, found: Adjustment) -> Adjustment:
    """Round the weights that the plan quantizes, with the scales of their ranges or with those
    that were found before.

    Layers go in execution order, on inputs that those before have changed; inputs are not
    quantized, whatever the plan says. Without `true_sequential`, the layers of a block are
    rounded on their inputs in the float block. Columns of zeros and layers that no token
    reached stay at round-to-nearest, and so is a layer whose outputs on the calibration data
    would be worse; the remarks say which.

    Raises:
        DataError: a value in the network is not finite; layer and batch are named.
    """
    return _in_order(task, found, GptqTarget(settings))


def gptaq(task: Task, settings: GPTAQConfig, found: Adjustment) -> Adjustment:
    """As `gptq`, with the float network run beside the rounded one; errors are those to the
    weights it aims at.
    """
    return _in_order(task, found, GptaqTarget(settings))


def qronos(task: Task, settings: QronosConfig, found: Adjustment) -> Adjustment:
    """As `gptaq`, with another target."""
    return _in_order(task, found, QronosTarget(settings))


def _in_order(task: Task, found: Adjustment, target: GptqTarget) -> Adjustment:
    rounding = _SequentialRounding(task, found, target)
    for block, members in itertools.groupby(
        enumerate(task.structure.groups), lambda row: row[1].block
    ):
        one_by_one = target.settings.true_sequential or block is None
        for chunk in ([row] for row in members) if one_by_one else [list(members)]:
            rounding.process(chunk)  # all of them are summed up before any is rounded
    return rounding.found


@dataclass(frozen=True)
class _Gathered:
    """Layers that multiply one value alike, and the sums of that value."""

    names: list[str]
    gram: Gram
    drift: Drift | None

    def cost(self, network: Network) -> float:
        """About how long it takes to round them: rows x depth^2."""
        matrices = (
            weight_matrix(network.layers[n], network.layers[n].get_parameter("weight"))
            for n in self.names
        )
        return float(sum(matrix.numel() * matrix.shape[2] for matrix in matrices))

    def merge(self, ranks: Ranks, to: int) -> None:
        """Add up the sums of all ranks, at rank `to`."""
        self.gram.merge(ranks, to)
        if self.drift is not None:
            self.drift.merge(ranks, to)


class _SequentialRounding:
    """The network as it is rounded so far, beside the float one where the target needs that."""

    def __init__(self, task: Task, found: Adjustment, target: GptqTarget) -> None:
        self.task, self.found, self.target = task, found, target
        graph, store = adjusted(task.graph, found), ActivationStore(task.memory)
        self.runner = self._runner(graph, store)
        self.float_runner = self._runner(graph, store) if target.needs_float else None
        own = {
            name
            for group in task.structure.groups
            for name in quantized_layers(self.task, group)
        }
        for name, rounded in found.rounded.items():
            if name not in own:
                self._put(name, rounded.weight)

    def _runner(self, graph: Graph, store: ActivationStore) -> SequentialRunner:
        return SequentialRunner(
            Network(graph), self.task.batches(), store, self.task.ranks, together=True
        )

    def process(self, chunk: Sequence[tuple[int, InputGroup]]) -> None:
        """Round the layers of these groups; those that an interrupted run has rounded get what
        it found.
        """
        fresh = [number for number, _ in chunk if number >= self.task.done]
        gathered, runner = {}, self.runner
        for number, group in chunk:
            if number in fresh:
                if number != fresh[0]:
                    runner = self.runner.branch() if runner is self.runner else runner
                gathered[number] = self._gather(runner, quantized_layers(self.task, group))
        solved = self._shared_out(gathered)
        for number, group in chunk:
            for rounded in solved.pop(number, ()):
                self.found = self.found.with_rounded(rounded.layers).with_remarks(
                    *rounded.remarks
                )
            for name in quantized_layers(self.task, group):
                self._put(name, self._weight(name))
            if number in fresh:
                self.task.after_group(self.found, number + 1)

    def _gather(self, runner: SequentialRunner, names: Sequence[str]) -> list[_Gathered]:
        """Run up to the value that the layers read, and sum it up."""
        network = runner.network
        by_reading: dict[tuple[Any, ...], list[str]] = {}
        for name in names:
            read = network.graph.by_name[name].operands.values()
            by_reading.setdefault((*read, *geometry(network.layers[name])), []).append(name)
        found = []
        for alike in by_reading.values():
            layer = network.layers[alike[0]]
            if weight_matrix(layer, layer.get_parameter("weight")).shape[2] > DEEPEST:
                self._remark(alike, TOO_DEEP)
                continue
            each = _Gathered(alike, Gram(layer), Drift(layer) if self.float_runner else None)
            runner.advance(*watching(network, alike[0], self._watcher(each)))
            found.append(each)
        return found

    def _watcher(self, gathered: _Gathered) -> Callable[..., None]:
        """Takes in the value of each batch, beside that of the float network; tokens that other
        experts have there have no drift.
        """
        floats: Iterator[Any] = iter(())
        if self.float_runner is not None and not gathered.gram.is_routed:
            [source] = self.runner.network.graph.by_name[gathered.names[0]].operands.values()
            self.float_runner.advance(source)
            floats = iter(self.float_runner.value(source))

        def watch(input: Tensor, **routing: Tensor) -> None:  # noqa: A002 - as layers name it
            try:
                gathered.gram.add(input, **routing)
            except ObservationError as error:
                raise not_finite(gathered.names[0], error) from error
            if gathered.drift is not None and not routing:
                gathered.drift.add(next(floats), input)

        return watch

    def _shared_out(
        self, gathered: dict[int, list[_Gathered]]
    ) -> dict[int, Iterable[RoundedLayers]]:
        """What becomes of the layers of each group. Of several ranks each solves its share."""
        ranks, rows = self.task.ranks, dict(gathered)
        gathered.clear()  # so that sums are freed as layers are solved
        if ranks.is_alone:
            return {number: map(self._solve, row) for number, row in rows.items()}
        every = [each for row in rows.values() for each in row]
        owners = ranks.by_cost([each.cost(self.runner.network) for each in every])
        for each, owner in zip(every, owners, strict=True):
            each.merge(ranks, owner)
        pairs = list(zip(every, owners, strict=True))
        own = [
            self._solve(each) if owner == ranks.rank else RoundedLayers()
            for each, owner in pairs
        ]
        places = [f"{each.names[0]}, rounded" for each in every]
        found = iter([ranks.broadcast(*row) for row in zip(own, places, owners, strict=True)])
        return {number: list(itertools.islice(found, len(row))) for number, row in rows.items()}

    def _solve(self, gathered: _Gathered) -> RoundedLayers:
        if gathered.gram.tokens == 0:
            return RoundedLayers({}, [Remark(name, UNREACHED) for name in gathered.names])
        specs = {name: self.task.specs[name, "weights"] for name in gathered.names}
        layers, given = (
            {name: self.runner.network.layers[name] for name in gathered.names},
            self.found.qparams,
        )
        drift = (
            gathered.drift.matrix
            if gathered.drift is not None
            else [None] * len(gathered.gram.matrix)
        )
        products = [Products(*pair) for pair in zip(gathered.gram.matrix, drift, strict=True)]
        experts = {
            name: layer for name, layer in layers.items() if isinstance(layer, ExpertLinear)
        }
        if experts:
            return round_experts(
                experts, specs, given, products, gathered.gram.by_group, self.target
            )
        members = [
            Member.of(name, layer, specs[name], given.get(name))
            for name, layer in layers.items()
        ]
        return round_layers(members, products, gathered.gram.tokens, self.target)

    def _weight(self, name: str) -> Tensor:
        """The layer's weight from now on; where nothing was found, rounded to nearest, as it
        will be.
        """
        if name in self.found.rounded:
            return self.found.rounded[name].weight
        spec = self.task.specs[name, "weights"]
        weight = self.runner.network.layers[name].get_parameter("weight")
        return nearest(
            weight, spec, self.found.qparams.get(name) or nearest_qparams(spec, weight)
        )

    def _put(self, name: str, weight: Tensor) -> None:
        set_parameter(self.runner.network.layers[name], "weight", weight)

    def _remark(self, names: Sequence[str], text: str) -> None:
        self.found = self.found.with_remarks(*(Remark(name, text) for name in names))
