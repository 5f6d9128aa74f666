"""Brings the parts of a join to one range where one scale would lose too many bits.

Parts are multiplied by powers of two, and the weights that read them are divided by the same
powers. If a layer reads boxes in pixels and scores below 1, the scores are multiplied by 512
and their weights are divided by 512. Then boxes and scores both have 8 bits on one scale.
Multiplying by powers of two is exact, so that the float network's outputs stay the same.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.calibration import observing
from quantizer.calibration.observing import DISTRIBUTION, Calibration
from quantizer.config.roles import is_parameter
from quantizer.graph.edits import Insertion, rescale_weight
from quantizer.graph.ir import Graph, Node
from quantizer.graph.output_names import unused_names
from quantizer.layerwise.adjustment import Adjustment
from quantizer.observers import Observer
from quantizer.observers.converted import combine
from quantizer.plan.layout import PART_SCALE
from quantizer.plan.model import JoinPlan, Key, Plan, TensorPlan
from quantizer.storage.deferred_tensor import deferred_like, loaded


@dataclass(frozen=True)
class ScaledPart:
    """A run of channels of a join.

    Args:
        key: the tensor that the channels come from.
        channels: how many channels there are.
        factor: the power of two that they are multiplied by.
    """

    key: Key
    channels: int
    factor: float


@dataclass(frozen=True)
class Scaling:
    """Factors for a joined value.

    Attributes:
        join: the layer that joins the parts.
        value: the layer whose value is multiplied: the join, or a layer that follows it.
        readers: the layers that read the product instead of the value.
        parts: the runs of the readers' input channels, in order.
    """

    join: str
    value: str
    readers: tuple[str, ...]
    parts: tuple[ScaledPart, ...]

    @property
    def factors(self) -> Tensor:
        """Return the factor of each channel."""
        channels = torch.tensor([part.channels for part in self.parts])
        factors = torch.tensor([part.factor for part in self.parts])
        return factors.repeat_interleave(channels)


def scalings(
    calibration: Calibration, joins: Iterable[JoinPlan], fixed: Collection[str]
) -> list[Scaling]:
    """Return the factors for joins that lose too many bits on one scale.

    Args:
        calibration: which has observed all data.
        joins: these joins, of its plan.
        fixed: layers whose weights must not change.
    """
    graph = calibration.plan.graph
    scalings = []
    for join in joins:
        free = [layer for layer in join.scalable if layer not in fixed]
        has_fixed = len(free) < len(join.scalable)
        # Fixed layers go on reading the join itself, which has no quantizer of its own here
        if has_fixed and join.is_of_channels and not join.inputs:
            continue
        by_value: dict[str, list[str]] = {}
        for layer in free:
            value = graph.by_name[layer].operands["input"]
            by_value.setdefault(value, []).append(layer)
        for value, layers in by_value.items():
            parts = _parts(join, layers[0], calibration)
            if parts:
                scaling = Scaling(join.name, value, tuple(layers), parts)
                scalings.append(scaling)
    return scalings


def _parts(join: JoinPlan, layer: str, calibration: Calibration) -> tuple[ScaledPart, ...]:
    """Return the parts of a layer's input, with factors that give all of them about the range
    of the widest.

    Return no parts if one is constant, or was observed with another spec than the whole join.
    """
    plan = calibration.plan
    whole_spec = plan.tensors[join.single or join.inputs[0]].spec
    runs = []
    for key, channels in join.parts[layer]:
        observer = None if key is None else calibration.observers.get(key)
        if key is None or observer is None or observer.spec != whole_spec:
            return ()
        runs.append((key, channels, _largest(observer)))
    widest = max(size for _, _, size in runs)
    dtype = plan.graph.by_name[layer].dtype or torch.float32
    # Powers of two of larger exponents have no inverse in this dtype
    max_exponent = -math.log2(torch.finfo(dtype).tiny)
    parts = []
    for key, channels, size in runs:
        # A part of zeros alone has no range to widen
        exponent = 0
        if size:
            exponent = round(math.log2(widest / size))
        factor = 2.0 ** min(exponent, max_exponent)
        parts.append(ScaledPart(key, channels, factor))
    return tuple(parts)


def _largest(observer: Observer) -> float:
    """Return the largest magnitude in a tensor's range; 0 if all values are zero."""
    if bool((observer.low == 0).all() and (observer.high == 0).all()):
        return 0.0
    qparams = observer.qparams()
    lowest = (observer.spec.quant_min - qparams.zero_point) * qparams.scale
    highest = (observer.spec.quant_max - qparams.zero_point) * qparams.scale
    return max(float(lowest.abs().max()), float(highest.abs().max()))


def scaling_adjustment(graph: Graph, scalings: Iterable[Scaling]) -> Adjustment:
    """Return an adjustment that inserts the multiplications and divides the weights."""
    changes = Adjustment()
    names = {*graph.by_name}
    for scaling in scalings:
        factors = scaling.factors
        for layer in scaling.readers:
            node = graph.by_name[layer]
            weight = graph.weight(node)
            divided = _divided(node, loaded(weight), factors)
            changes = changes.with_parameters(layer, weight=deferred_like(weight, divided))
        path, _, _ = scaling.value.rpartition("/")
        [name] = unused_names([f"{path}/{PART_SCALE}"], names)
        names.add(name)
        is_linear = graph.by_name[scaling.readers[0]].row.spatial == 0
        axis = -1 if is_linear else 1
        row = Insertion(
            name,
            PART_SCALE,
            scaling.value,
            scaling.readers,
            factors.to(graph.device),
            {"axis": axis},
        )
        changes = replace(changes, insertions=(*changes.insertions, row))
    return changes


def _divided(node: Node, weight: Tensor, factors: Tensor) -> Tensor:
    """Return a layer's weight, divided by the factors of its input channels."""
    inverse = 1 / factors.to(weight)
    if node.row.scales_channels:
        return weight * inverse
    return rescale_weight(node, weight, inputs=inverse)


def taken_over(
    before: Calibration, plan: Plan, scalings: Iterable[Scaling], inserted: Iterable[Insertion]
) -> Calibration | None:
    """Return a calibration of a later plan, with the statistics of the calibration before; None
    if it lacks those of a tensor.

    The range of a scaled value is computed from the ranges of its parts.

    Args:
        before: the calibration of the graph without scalings.
        plan: for the graph with the scalings.
        scalings: of the joins.
        inserted: the layer that multiplies, for each scaling.
    """
    parts: dict[str, tuple[ScaledPart, ...]] = {
        row.name: scaling.parts for row, scaling in zip(inserted, scalings, strict=True)
    }
    if not all(_is_seen(before, tensor, parts) for tensor in plan.tensors.values()):
        return None
    after = observing.create_observers(plan)
    observers = {
        key: observer for key, observer in before.observers.items() if not is_parameter(key[1])
    }
    shared: dict[str, Observer] = {}
    for key, observer in after.observers.items():
        source = plan.tensors[key].source
        if is_parameter(key[1]):
            observers[key] = observer
        elif source in parts:
            pairs = [(before.observers[part.key], part.factor) for part in parts[source]]
            new = combine(observer.spec, pairs)
            observers[key] = shared.setdefault(source, new)
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


def _is_seen(
    before: Calibration, tensor: TensorPlan, parts: Mapping[str, tuple[ScaledPart, ...]]
) -> bool:
    """Return whether a calibration has the statistics of a tensor of a later plan.

    It may lack some, because an entry of the config may apply to the scaled value and not to
    its parts. Then the parts were observed with another spec.

    Args:
        before: the calibration.
        tensor: of the later plan.
        parts: of each scaled value, by the layer that is inserted for it.
    """
    if not tensor.is_calibrated:
        return True
    if tensor.source not in parts:
        observer = before.observers.get((tensor.layer, tensor.role))
        return observer is not None and observer.spec == tensor.spec.stored
    # Ranges of parts can be united to one range, and not to ranges of channels
    if not tensor.spec.has_one_scale or tensor.channels is not None:
        return False
    for part in parts[tensor.source]:
        observer = before.observers[part.key]
        place = before.plan.tensors[part.key].place
        has_histogram = observer.has_histogram or place in before.histograms
        if observer.spec != tensor.spec or not has_histogram:
            return False
    return True


def _histogram(before: Calibration, parts: Iterable[ScaledPart]) -> Observer:
    """Return the distribution of a scaled join's values."""
    pairs = []
    for part in parts:
        place = before.plan.tensors[part.key].place
        pairs.append((before.histograms[place], part.factor))
    return combine(DISTRIBUTION, pairs)
