"""Measures the output noise of each quantized tensor: with only it quantized, and with
everything quantized except it.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantizer.comparison.output_measure import OutputMeasure
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.channels.output_parts import output_parts, parts_named_as
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.layerwise.sequential_runner import no_batches
from quantizer.nn.network import Execution, Network
from quantizer.nn.segments import finish_together
from quantizer.numerics.metrics import decibel
from quantizer.plan.model import Key
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch, prefix_batch_errors

_MOST_BRANCHES = 8
"""Executions that run together."""


@dataclass(frozen=True)
class Effect:
    """The output noise that one tensor causes.

    Attributes:
        key: layer and role of the tensor.
        alone: the noise energy of each batch when only this tensor is quantized; empty if
            that was not measured.
        without: the noise energy of each batch when all other tensors are quantized.
    """

    key: Key
    alone: Sequence[float]
    without: Sequence[float]


@dataclass(frozen=True)
class Ablation:
    """The effects of all tensors on the output.

    Attributes:
        effects: of each tensor, in execution order.
        signal: the energy of the float outputs, per batch.
        noise: the noise energy with everything quantized, per batch.
        sqnr_db: of the worst output or part, with everything quantized.
    """

    effects: Sequence[Effect]
    signal: Sequence[float]
    noise: Sequence[float]
    sqnr_db: float

    def alone_db(self, effect: Effect) -> float:
        """Return the output SQNR when only this tensor is quantized."""
        return _ratio_db(self.signal, effect.alone)

    def gain_db(self, effect: Effect) -> float:
        """Return by how much the output SQNR rises when this tensor stays in float.

        The gain is negative where errors cancel.
        """
        return _ratio_db(self.noise, effect.without)

    @property
    def floor_db(self) -> float | None:
        """Return the difference between two gains below which it means nothing.

        It is the median over tensors of how far the gains on two halves of the data are apart;
        None with a single batch.
        """
        if len(self.signal) < 2:
            return None
        differences = []
        for effect in self.effects:
            even = _ratio_db(self.noise[0::2], effect.without[0::2])
            odd = _ratio_db(self.noise[1::2], effect.without[1::2])
            if math.isfinite(even - odd):
                differences.append(abs(even - odd))
        return statistics.median(differences) if differences else None

    @property
    def best(self) -> tuple[Key, float] | None:
        """Return the tensor with the largest gain, and that gain in dB; None if none was
        measured.
        """
        gains = {effect.key: self.gain_db(effect) for effect in self.effects}
        if not gains:
            return None
        key = max(gains, key=gains.__getitem__)
        return key, gains[key]


def _ratio_db(signal: Sequence[float], noise: Sequence[float]) -> float:
    return decibel(math.fsum(signal), math.fsum(noise))


def ablate_calibrated(
    calibrated: Calibrated,
    batches: Iterable[Batch],
    *,
    after_tensor: Callable[[], None] = lambda: None,
    is_alone_measured: bool = False,
) -> Ablation:
    """Measure the effect of each tensor of a calibrated network.

    Args:
        calibrated: the model and its calibration.
        batches: on the model's device.
        after_tensor, is_alone_measured: as for `ablate`.
    """
    user = None if calibrated.user_graph is None else Network(calibrated.user_graph)
    return ablate(
        Network(calibrated.float_graph),
        calibrated.network(),
        batches,
        after_tensor=after_tensor,
        user=user,
        is_alone_measured=is_alone_measured,
    )


@torch.no_grad()
def ablate(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    *,
    after_tensor: Callable[[], None] = lambda: None,
    keys: Collection[Key] | None = None,
    user: Network | None = None,
    measure: OutputMeasure | None = None,
    is_alone_measured: bool = True,
) -> Ablation:
    """Measure the effect of each tensor that `quantized` quantizes.

    The nodes after a tensor run once per batch, and once more if `is_alone_measured`. The noise
    of a tensor alone is measured against `reference`, because the error of passes would mask
    it.

    Args:
        reference: the same nodes in float.
        after_tensor: called when one tensor is done.
        keys: the tensors to measure; all if None.
        user: the user's model, if `reference` computes another function.
        measure: of noise; all parts of the outputs count alike if None.
        is_alone_measured: whether the noise of each tensor alone is wanted, too.

    Raises:
        DataError: no batch, or an output of the float network that is not finite.
    """
    alone = _without_noises(quantized, keys)
    without = _without_noises(quantized, keys)
    signal: list[float] = []
    noise: list[float] = []
    compared = reference if user is None else user
    if measure is None:
        measure = OutputMeasure(output_parts(compared.graph))
    reference_measure = measure
    if user is not None:
        reference_measure = measure.of(parts_named_as(reference.graph, user.graph))
    float_branches = _Branches(reference, quantized, reference_measure, alone)
    quantized_branches = _Branches(quantized, reference, measure, without)
    measured = [quantized_branches]
    if is_alone_measured:
        measured.insert(0, float_branches)
    for batch in batches:
        with prefix_batch_errors(len(signal)):
            float_run = float_branches.start(batch)
            quantized_run = quantized_branches.start(batch)
            signal.append(reference_measure.expect(float_run.branch()))
            if user is not None:
                signal[-1] = measure.expect(user.start(batch.args, batch.kwargs))
            for node in quantized.graph.nodes:
                for role in list(quantized.layers[node.name].quantizers):
                    if (node.name, role) not in without:
                        continue
                    for branches in measured:
                        branches.add((node.name, role))
                    after_tensor()
                for branches in measured:
                    branches.execution.step()
            for branches in measured:
                branches.finish()
            noise.append(measure.noise(quantized_run, is_counted=True))
    if not signal:
        raise no_batches()
    effects = []
    for key, noises in alone.items():
        effects.append(Effect(key, noises, without[key]))
    return Ablation(effects, signal, noise, measure.sqnr_db)


def _without_noises(quantized: Network, keys: Collection[Key] | None) -> dict[Key, list[float]]:
    """Return an empty list for each tensor that is measured."""
    noises: dict[Key, list[float]] = {}
    for name, role, _ in quantized.quantizers():
        if keys is None or (name, role) in keys:
            noises[name, role] = []
    return noises


class _Branches:
    """Executions of a network that use one tensor of another network, and measures their noise.

    If weights are in files, several executions run together, so that each weight is read once
    for all of them.

    Args:
        network: what runs.
        owner: the other network.
        measure: of noise.
        noises: the noise of each batch, by the tensor. It is added there.

    Attributes:
        execution: of a batch without tensors of the other network.
    """

    execution: Execution

    def __init__(
        self,
        network: Network,
        owner: Network,
        measure: OutputMeasure,
        noises: Mapping[Key, list[float]],
    ) -> None:
        self._network = network
        self._owner = owner
        self._measure = measure
        self._noises = noises
        self._most = _MOST_BRANCHES if network.graph.is_deferred else 1
        self._keys: list[Key] = []
        self._executions: list[Execution] = []

    def start(self, batch: Batch) -> Execution:
        """Start and return the execution of a batch."""
        self.execution = self._network.start(batch.args, batch.kwargs)
        return self.execution

    def add(self, key: Key) -> None:
        """Add a branch of the execution whose next node uses a tensor of the other network."""
        branch = self.execution.branch()
        with _borrowed_tensor(self._network, self._owner, key):
            branch.step()
        self._keys.append(key)
        self._executions.append(branch)
        if len(self._keys) >= self._most:
            self.finish()

    def finish(self) -> None:
        """Run the branches to the end, and measure their noise."""
        keys = self._keys
        executions = self._executions
        self._keys = []
        self._executions = []

        def finished(index: int, execution: Execution) -> None:
            noise = self._measure.noise(execution)
            self._noises[keys[index]].append(noise)

        finish_together(self._network, executions, finished)


@contextlib.contextmanager
def _borrowed_tensor(borrower: Network, owner: Network, key: Key) -> Iterator[None]:
    """Use a tensor of one network in another for a while: a parameter, or the quantizer of an
    activation.
    """
    name, role = key
    layer = borrower.layers[name]
    lender = owner.layers[name]
    if is_parameter(role):
        name = parameter_name(role)
        parameter = layer.get_parameter(name)
        try:
            set_parameter(layer, name, lender.get_parameter(name))
            yield
        finally:
            set_parameter(layer, name, parameter)
        return
    quantizer = layer.quantizers._modules.pop(role, None)
    borrowed = lender.quantizers._modules.get(role)
    try:
        if borrowed is not None:
            layer.quantizers[role] = borrowed
        yield
    finally:
        layer.quantizers._modules.pop(role, None)
        if quantizer is not None:
            layer.quantizers[role] = quantizer
