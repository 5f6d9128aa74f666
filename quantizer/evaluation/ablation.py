"""Measures the output noise of each quantized tensor: with only it quantized, and with
everything quantized except it. Finds the tensor that causes the loss of an output.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantizer.comparison.output_figures import PartFigures, leaves
from quantizer.comparison.output_measure import OutputMeasure
from quantizer.comparison.samples import LOW_DB
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import named_output
from quantizer.evaluation.network_comparison import LayerNoise, NetworkComparison, Networks
from quantizer.graph.channels.output_parts import Output, output_parts, parts_named_as
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.layerwise.sequential_runner import no_batches
from quantizer.nn.network import Execution, Network
from quantizer.nn.segments import finish_together
from quantizer.numerics.metrics import decibel
from quantizer.plan.model import Key
from quantizer.plugins import if_command
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch, prefix_batch_errors

_MOST_BRANCHES = 8
"""Executions that run together."""
MAX_TRIED = 8
"""Tensors that are tried in float on one batch. Each costs a run of the nodes after it."""
_MIN_GAIN_DB = 0.1
"""A smaller gain is not reported."""


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


def best_in_float(
    keys: Iterable[Key], networks: Networks, part: str | None = None
) -> tuple[Key, float] | None:
    """Return the tensor that helps most when it stays in float on the first batch, and the gain
    in dB; None if none was measured.

    Args:
        keys: the tensors to try.
        networks: of the test.
        part: the output or part that counts; None for all.
    """
    measure: OutputMeasure | None = None
    if part is not None:
        measure = OutputMeasure(networks.outputs, only=part)
    ablation = ablate(
        networks.reference,
        networks.quantized,
        [networks.first],
        keys=list(keys),
        user=networks.user,
        is_alone_measured=False,
        measure=measure,
    )
    return ablation.best


def suspects(
    part: PartFigures, output: Output, compared: NetworkComparison, graph: Graph
) -> Iterator[Key]:
    """Yield the tensors that a part depends on, from the output backwards."""
    measured: dict[str, list[Key]] = {}
    for noise in sorted(compared.layers, key=lambda noise: noise.local.sqnr_db):
        measured.setdefault(noise.layer, []).append((noise.layer, noise.role))
    pending = [output.node]
    layers = {known.name: known.layer for known in output.parts}
    if output.labels is not None and layers.get(part.name):
        nodes = [node.name for node in output.labels.replay.nodes]
        pending = [*reversed(nodes), layers[part.name]]
    seen: set[str] = set()
    joins = set(pending[:-1])
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield from measured.get(name, ())
        if name not in joins:
            pending += graph.by_name[name].refs()


def remark_on_low_sqnr(
    lowest: PartFigures, compared: NetworkComparison, networks: Networks
) -> str:
    """Return sentences on an output SQNR below LOW_DB: where it begins, and which tensor to
    leave in float.

    Args:
        lowest: the output or part with that SQNR.
        compared: the result of the test.
        networks: what was compared.
    """
    is_only = len(list(leaves(compared.outputs))) == 1
    subject = "the output's SQNR" if is_only else f"the SQNR of {named_output(lowest.name)}"
    sentences = [
        f"{subject} is {lowest.sqnr_db:.1f} dB; below {LOW_DB:g} dB few networks are usable"
    ]
    sources: set[str] = set()
    for noise in compared.layers:
        if _accumulated_db(noise) < LOW_DB:
            sentences.append(
                f"The first tensor below that is the {noise.role} of {noise.layer} "
                f"({_accumulated_db(noise):.1f} dB)"
            )
            sources = set(_sources(noise.layer, networks.reference, compared))
            break
    # The inputs of that layer come first: their own SQNR is high if a few of their values are
    # far larger than the others.
    candidates = sorted(
        compared.layers, key=lambda noise: (noise.layer not in sources, noise.local.sqnr_db)
    )
    sentences += _most_helpful(candidates[:MAX_TRIED], networks)
    more = if_command(
        "analyze",
        "`quantizer analyze --tensors` measures all tensors; `--metric` finds the layers that "
        "have to stay in float",
    )
    return ". ".join(filter(None, (*sentences, more)))


def _accumulated_db(noise: LayerNoise) -> float:
    """Return the SQNR of a tensor in the quantized network; weights have none."""
    return math.inf if noise.accumulated is None else noise.accumulated.sqnr_db


def _sources(layer: str, reference: Network, compared: NetworkComparison) -> Iterator[str]:
    """Yield the layer, and the nearest layers before it that have quantized tensors."""
    yield layer
    measured = {noise.layer for noise in compared.layers}
    seen = {layer}
    pending = [*reference.graph.by_name[layer].refs()]
    while pending:
        name = pending.pop()
        if name in measured:
            yield name
        elif name not in seen:
            pending += reference.graph.by_name[name].refs()
        seen.add(name)


def _most_helpful(candidates: list[LayerNoise], networks: Networks) -> Iterator[str]:
    """Yield a sentence on the tensor that helps most when it stays in float, if any helps."""
    keys = [(noise.layer, noise.role) for noise in candidates]
    best = best_in_float(keys, networks)
    if best is None:
        return
    (layer, role), gain = best
    if gain >= _MIN_GAIN_DB:
        yield (
            f"Of {len(candidates)} tensors that were tried in float, the {role} of {layer} "
            f"helps most: {gain:.1f} dB more on the first batch"
        )
