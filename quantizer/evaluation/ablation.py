"""What each quantized tensor does to the network's output: it alone quantized, and all
quantized but it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from quantizer.comparison.output_measure import OutputMeasure
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.errors import DataError
from quantizer.graph.output_parts import output_parts, parts_named_as
from quantizer.graph.parameters import set_parameter
from quantizer.nn.layer import Layer
from quantizer.nn.network import Network
from quantizer.numerics.metrics import decibel
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch, naming_batch


@dataclass(frozen=True)
class Effect:
    """Of one tensor, batch by batch: the noise at the output when it alone is quantized, and
    when all others are.
    """

    key: Key
    alone: tuple[float, ...]
    without: tuple[float, ...]


@dataclass(frozen=True)
class Ablation:
    """All tensors in execution order; `signal` and `noise` are the outputs', with everything
    quantized, by batch.

    Each output and part counts alike (`OutputMeasure`); `sqnr_db` is that of the worst, with
    everything quantized.
    """

    effects: tuple[Effect, ...]
    signal: tuple[float, ...]
    noise: tuple[float, ...]
    sqnr_db: float

    def alone_db(self, effect: Effect) -> float:
        """Output SQNR when this tensor alone is quantized."""
        return decibel(math.fsum(self.signal), math.fsum(effect.alone))

    def gain_db(self, effect: Effect) -> float:
        """By how much output SQNR rises when this tensor is left in float; below 0 where errors
        cancel.
        """
        return decibel(math.fsum(self.noise), math.fsum(effect.without))

    @property
    def floor_db(self) -> float | None:
        """What differences of gains mean nothing below: how far those of two halves of the data
        are apart, in the median over tensors; None with a single batch.
        """
        if len(self.signal) < 2:
            return None
        apart = [abs(self._half(effect, 0) - self._half(effect, 1)) for effect in self.effects]
        finite = [value for value in apart if math.isfinite(value)]
        return statistics.median(finite) if finite else None

    def _half(self, effect: Effect, first: int) -> float:
        return decibel(math.fsum(self.noise[first::2]), math.fsum(effect.without[first::2]))


def ablate(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    after_tensor: Callable[[], None] = lambda: None,
    keys: Collection[Key] | None = None,
    user: Network | None = None,
    *,
    measure: OutputMeasure | None = None,
) -> Ablation:
    """Measure every tensor that `quantized` quantizes, or those of `keys`; `reference` has the
    same nodes in float.

    For each batch and tensor what comes after it runs twice. The noise of all tensors, and of
    all but one, is that against `user`, the model itself, where `reference` computes another
    function; that of one alone is against `reference`, as it would be lost in what else
    differs.

    Args:
        after_tensor: called when one is done.
        measure: what counts of the outputs; all of their parts alike, if it is None.

    Raises:
        DataError: no batch, or an output of the float network that is not finite.
    """
    wanted = [
        (name, role)
        for name, role, _ in quantized.quantizers()
        if keys is None or (name, role) in keys
    ]
    alone: dict[Key, list[float]] = {key: [] for key in wanted}
    without: dict[Key, list[float]] = {key: [] for key in wanted}
    signal, noise = list[float](), list[float]()
    compared = reference if user is None else user
    measure = OutputMeasure(output_parts(compared.graph)) if measure is None else measure
    passed = measure
    if user is not None:
        passed = measure.of(parts_named_as(reference.graph, user.graph))
    with torch.no_grad():
        for batch in batches:
            with naming_batch(len(signal)):
                left, right = (
                    each.start(batch.args, batch.kwargs) for each in (reference, quantized)
                )
                signal.append(passed.expect(left.branch()))
                if user is not None:
                    signal[-1] = measure.expect(user.start(batch.args, batch.kwargs))
                noise.append(measure.noise(right.branch(), is_counted=True))
            for node in quantized.graph.nodes:
                mine, its = reference.layers[node.name], quantized.layers[node.name]
                for role in [role for role in its.quantizers if (node.name, role) in alone]:
                    with _tensor_of(mine, its, role):
                        alone[node.name, role].append(passed.noise(left.branch()))
                    with _tensor_of(its, mine, role):
                        without[node.name, role].append(measure.noise(right.branch()))
                    after_tensor()
                left.step()
                right.step()
    if not signal:
        raise DataError(
            "the calibration data has no batches", help="check --data and --subset_len"
        )
    effects = tuple(Effect(key, tuple(alone[key]), tuple(without[key])) for key in wanted)
    return Ablation(effects, tuple(signal), tuple(noise), measure.sqnr_db)


@contextlib.contextmanager
def _tensor_of(layer: Layer, other: Layer, role: str) -> Iterator[None]:
    """A layer with one tensor as another layer has it, for a while: a parameter, or what
    quantizes an activation.
    """
    if is_parameter(role):
        name = parameter_name(role)
        kept, given = layer.get_parameter(name), other.get_parameter(name)
        try:
            set_parameter(layer, name, given)
            yield
        finally:
            set_parameter(layer, name, kept)
        return
    before = layer.quantizers._modules.pop(role, None)
    try:
        if (given_quantizer := other.quantizers._modules.get(role)) is not None:
            layer.quantizers[role] = given_quantizer
        yield
    finally:
        layer.quantizers._modules.pop(role, None)
        if before is not None:
            layer.quantizers[role] = before
