"""Brings the parts of a join to one range where one scale would lose too much: factors that
weights take back.

A layer that multiplies boxes in pixels and scores below 1 gets the scores times 512, and
weights for them that are 512 times smaller: both then have 8 bits of one scale, and so have
their weights. Powers of two change no float value.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.calibration import observing
from quantizer.calibration.observing import DISTRIBUTION, Calibration
from quantizer.config.roles import is_parameter
from quantizer.graph.edits import Insertion, rescaled
from quantizer.graph.ir import Graph, Node
from quantizer.observers import Observer
from quantizer.plan.groups import PART_SCALE
from quantizer.plan.model import JoinPlan, Key, Plan, TensorPlan
from quantizer.storage.deferred_tensor import beside, loaded


@dataclass(frozen=True)
class Part:
    """The tensor that a run of channels comes from, the run's length, and what it is multiplied
    with.
    """

    key: Key
    channels: int
    factor: float


@dataclass(frozen=True)
class Scaling:
    """Factors for a joined value.

    Attributes:
        join: the layer that joins it.
        value: the layer whose value is multiplied: the join, or what follows it.
        readers: the layers that read the product instead.
        parts: along their input channels.
    """

    join: str
    value: str
    readers: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def factors(self) -> Tensor:
        """The factor of each channel."""
        channels = torch.tensor([part.channels for part in self.parts])
        return torch.tensor([part.factor for part in self.parts]).repeat_interleave(channels)


def scalings(
    calibration: Calibration, joins: Iterable[JoinPlan], fixed: Container[str]
) -> list[Scaling]:
    """Return the factors for joins that have lost too much on one scale.

    Args:
        calibration: which has seen all data.
        joins: these joins, of its plan.
        fixed: layers whose weights must stay as they are.
    """
    graph = calibration.plan.graph
    found: list[Scaling] = []
    for join in joins:
        if (
            join.is_of_channels
            and not join.inputs
            and any(layer in fixed for layer in join.scalable)
        ):
            continue  # others would read what is not quantized
        by_value: dict[str, list[str]] = {}
        for layer in join.scalable:
            if layer not in fixed:
                by_value.setdefault(graph.by_name[layer].operands["input"], []).append(layer)
        for value, layers in by_value.items():
            parts = _parts(join, layers[0], calibration)
            if parts:
                found.append(Scaling(join.name, value, tuple(layers), parts))
    return found


def _parts(join: JoinPlan, layer: str, calibration: Calibration) -> tuple[Part, ...]:
    """The factors that give all parts about the range of the widest; none where a part has no
    observer alike.
    """
    runs = join.parts[layer]
    sizes: dict[Key, float] = {}
    whole = calibration.plan.tensors[join.single or join.inputs[0]].spec
    for key, _ in runs:
        if (
            key is None
            or key not in calibration.observers
            or calibration.observers[key].spec != whole
        ):
            return ()
        sizes[key] = _largest(calibration.observers[key])
    widest = max(sizes.values())
    dtype = calibration.plan.graph.by_name[layer].dtype or torch.float32
    # Of exponents whose powers of two have inverses in this format
    largest = -math.log2(torch.finfo(dtype).tiny)
    parts: list[Part] = []
    for key, channels in runs:
        assert key is not None  # or it had returned
        exponent = round(math.log2(widest / sizes[key])) if sizes[key] else 0
        parts.append(Part(key, channels, 2.0 ** min(exponent, largest)))
    return tuple(parts)


def _largest(observer: Observer) -> float:
    """The largest magnitude in a tensor's range; 0 where all values are zero."""
    if not bool((observer.low != 0).any() or (observer.high != 0).any()):
        return 0.0
    qparams, spec = observer.qparams(), observer.spec
    ends = [
        (limit - qparams.zero_point) * qparams.scale
        for limit in (spec.quant_min, spec.quant_max)
    ]
    return max(float(end.abs().max()) for end in ends)


def adjustment(graph: Graph, found: Iterable[Scaling]) -> Adjustment:
    """Return the layers to insert and the weights that take their factors back."""
    result = Adjustment()
    taken = {*graph.by_name}
    for scaling in found:
        factors = scaling.factors
        for layer in scaling.readers:
            node = graph.by_name[layer]
            weight = graph.weight(node)
            changed = _taken_back(node, loaded(weight), factors)
            result = result.with_parameters(layer, weight=beside(weight, changed))
        is_linear = graph.by_name[scaling.readers[0]].row.spatial == 0
        name = _free_name(f"{scaling.value.rpartition('/')[0]}/{PART_SCALE}", taken)
        taken.add(name)
        axis = {"axis": -1 if is_linear else 1}
        weight = factors.to(graph.device)
        row = Insertion(name, PART_SCALE, scaling.value, scaling.readers, weight, axis)
        result = replace(result, insertions=(*result.insertions, row))
    return result


def _taken_back(node: Node, weight: Tensor, factors: Tensor) -> Tensor:
    """A layer's weight, divided by the factors of its input channels."""
    inverse = 1 / factors.to(weight)
    return (
        weight * inverse if node.row.scales_channels else rescaled(node, weight, inputs=inverse)
    )


def _free_name(name: str, taken: Container[str]) -> str:
    """The name, or with the first number that is free."""
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def is_seen(
    before: Calibration, plan: Plan, found: Iterable[Scaling], inserted: Iterable[Insertion]
) -> bool:
    """Return whether a calibration has seen all that a plan for the scaled graph needs, parts
    as the whole is planned.

    Another entry of the config may be for the scaled value than for its parts, and then they
    were observed otherwise.
    """
    parts = {row.name: scaling.parts for row, scaling in zip(inserted, found, strict=True)}
    for key, tensor in plan.tensors.items():
        if not tensor.is_calibrated:
            continue
        if tensor.source not in parts:
            observer = before.observers.get(key)
            if observer is None or observer.spec != tensor.spec:
                return False
            continue
        if not tensor.spec.has_one_scale or tensor.channels is not None:
            return False
        for part in parts[tensor.source]:
            place = before.plan.tensors[part.key].place
            is_alike = before.observers[part.key].spec == tensor.spec
            has_histogram = (
                before.observers[part.key].has_histogram or place in before.histograms
            )
            if not is_alike or not has_histogram:
                return False
    return True


def taken_over(
    before: Calibration, plan: Plan, found: Iterable[Scaling], inserted: Iterable[Insertion]
) -> Calibration:
    """Return a calibration of the plan for the scaled graph that has seen what the one before
    saw, if `is_seen`.
    """
    parts = {row.name: scaling.parts for row, scaling in zip(inserted, found, strict=True)}
    after = observing.start(plan)
    observers: dict[Key, Observer] = {
        key: each for key, each in before.observers.items() if not is_parameter(key[1])
    }
    together: dict[str, Observer] = {}
    for key, observer in after.observers.items():
        tensor = plan.tensors[key]
        if is_parameter(key[1]):
            observers[key] = observer
        elif tensor.source in parts:
            seen = [(before.observers[part.key], part.factor) for part in parts[tensor.source]]
            observers[key] = together.setdefault(
                tensor.source, Observer.of_parts(tensor.spec, seen)
            )
    histograms = dict(before.histograms)
    for source in after.histograms:
        if source in parts:
            histograms[source] = _histogram(before, parts[source])
    return replace(
        after,
        observers=observers,
        histograms=histograms,
        means=before.means,
        batches=before.batches,
    )


def _histogram(before: Calibration, parts: Iterable[Part]) -> Observer:
    """The distribution of a scaled join's values."""
    seen: list[tuple[Observer, float]] = []
    for part in parts:
        tensor: TensorPlan = before.plan.tensors[part.key]
        seen.append((before.histograms[tensor.place], part.factor))
    return Observer.of_parts(DISTRIBUTION, seen)
