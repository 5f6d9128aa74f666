"""The decision on the channels that one scale cannot serve, of inputs and between layers. They
are multiplied with powers of two, which the weights that read them take back.

In a depthwise convolution each output reads one channel. A channel whose range is a thousandth
of the widest has no bits left then, and no other channel makes up for it. Such a channel is
multiplied with a power of two in the layer that computes it, and divided by it in the layer
that reads it. Powers of two change no float value. The ranges are those of the first
calibration batches, and the factors are recorded in the results.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.equalization.equalization import LayerPair, find_pairs
from quantizer.algorithms.equalization.input_levels import (
    LARGEST_EXPONENT,
    WIDE,
    decide_input_levels,
)
from quantizer.calibration.request import CalibrationRequest, CalibrationState, Decision
from quantizer.comparison.extents import ends_along
from quantizer.config.wording import first_names
from quantizer.distributed import ALONE
from quantizer.graph.edits import by_channel, channels_of, reads_one_by_one, rescale_weight
from quantizer.graph.ir import Graph, Node
from quantizer.layerwise.adjustment import Adjustment
from quantizer.layerwise.fold import fold_factors, parameter
from quantizer.layerwise.gram import observe_all
from quantizer.nn.network import Network
from quantizer.plan.floating import input_values
from quantizer.plan.model import Plan
from quantizer.plan.readers import input_readers
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import deferred_like, loaded
from quantizer.storage.files import damaged

_MAX_BATCHES = 4
"""How many of the first calibration batches are read for the ranges of channels."""
LOST_BITS = 4
"""Channels are levelled if one that matters loses more bits than this on the common scale."""
HEARD_BITS = 8
"""A channel is left as it is if its products are this many bits smaller than the largest."""
Exponents = Mapping[str, Sequence[int]]
"""By layer, the power of two that each output channel is multiplied with."""


def _decide(request: CalibrationRequest, state: CalibrationState) -> Exponents:
    """Return the exponents of the channels that one scale cannot serve, of inputs and between
    layers. Report them, and the channels of inputs that stay coarse.

    The DPU computes nothing in float and has one scale for all weights of a layer, so its
    channels stay as they are.
    """
    plan = state.plan
    can_scale = plan.settings.target_device != "DPU"
    early = _early_batches(request)
    of_inputs = decide_input_levels(plan, early, can_scale=can_scale)
    for level, text in of_inputs.remarks:
        request.events.message(level, text)
    if not can_scale:
        return {}
    of_layers = decide_levels(plan, request.read())
    if of_layers:
        text = level_sentence(of_layers)
        request.events.message(logging.INFO, text)
    return {**of_layers, **of_inputs.exponents}


def _early_batches(request: CalibrationRequest) -> Iterator[Batch]:
    """Yield the calibration data. The first batch is kept, so that reading it costs nothing."""
    yield request.first_batch()
    batches = request.read()
    next(batches, None)
    yield from batches


def _apply(
    request: CalibrationRequest, state: CalibrationState, levels: Exponents
) -> CalibrationState:
    """Scale the channels, and make the plan again."""
    adjustment = _adjustment_of(state.plan.graph, levels)
    target = state.target.adjusted(adjustment)
    plan = target.plan(request.config)
    return replace(state, target=target, plan=plan, adjustment=adjustment)


def _adjustment_of(graph: Graph, exponents: Exponents) -> Adjustment:
    """Return an adjustment with all factors: those of layers, as `layers` has them, and
    those of inputs, which are multiplied in float before they are quantized.
    """
    adjustment = level_adjustment(graph, exponents)
    names = input_values(graph)
    groups = {row.group.source: row.group for row in input_readers(graph)}
    for source, levels in exponents.items():
        if source in names:
            inverse = 1 / _factors(levels).to(graph.device)
            adjustment = fold_factors(graph, groups[source], inverse, adjustment)
    return adjustment


def _check(levels: Exponents, passed: Graph, path: Path | str) -> None:
    """Refuse factors for channels that the model does not have.

    Raises:
        ResultError: naming the first layer.
    """
    readers = input_readers(passed) if levels else []
    inputs = {row.group.source: row.group.channels for row in readers}
    for name, exponents in levels.items():
        where = f"header/levels/{name}"
        node = passed.by_name.get(name)
        if name in inputs:
            channels = inputs[name]
        elif node is None or not node.is_multiplying:
            raise damaged(path, where, "there is no such layer with weights")
        else:
            channels, _ = channels_of(node, passed.weight(node))
        if not _are_exponents(exponents, channels):
            text = f"expected {channels} integers up to {LARGEST_EXPONENT}"
            raise damaged(path, where, text)


def _are_exponents(exponents: Any, channels: int) -> bool:
    if not isinstance(exponents, list) or len(exponents) != channels:
        return False
    return all(type(each) is int and abs(each) <= LARGEST_EXPONENT for each in exponents)


def _differences(first: Exponents, other: Exponents) -> Iterator[str]:
    """Yield a sentence if two calibrations have scaled channels differently."""
    if first != other:
        yield "their channels were levelled by different factors"


def _candidates(plan: Plan) -> list[LayerPair]:
    """Return pairs of layers of which the second reads channels one by one, each at a scale of
    its own, from a value with one scale.

    If no first layer has weights of very different size, there are none, so that no data are
    read in vain.
    """
    graph = plan.graph
    # Finding pairs takes longer than this check
    if not any(reads_one_by_one(graph, node) for node in graph.nodes):
        return []
    pairs = []
    has_small_rows = False
    for pair in find_pairs(graph):
        if reads_one_by_one(graph, pair.second) and _is_lossless(plan, pair):
            pairs.append(pair)
            weight = loaded(graph.weight(pair.first)).detach()
            sizes = _sizes(pair.first, weight, (2, 3))
            is_small = sizes * 2**LOST_BITS < sizes.max()
            is_small &= sizes > 0
            has_small_rows |= bool(is_small.any())
    return pairs if has_small_rows else []


def _is_lossless(plan: Plan, pair: LayerPair) -> bool:
    """Return whether levelling a pair of layers loses no bits of weights and helps the value
    between them.
    """
    for node in (pair.first, pair.second):
        if plan.graph.weight(node).dtype not in WIDE:
            return False
        if not _has_scale_by_channel(plan, node):
            return False
    return _has_one_scale(plan, pair)


def _has_one_scale(plan: Plan, pair: LayerPair) -> bool:
    """Return whether the value between two layers is quantized to integers of one scale, which
    calibration finds.
    """
    keys = [(pair.second.name, "input")]
    for node in (*pair.between, pair.first):
        keys.append((node.name, "activation"))
    is_quantized = False
    for key in keys:
        tensor = plan.tensors.get(key)
        if tensor is None:
            continue
        is_quantized = True
        spec = tensor.spec
        if not tensor.is_calibrated and not spec.is_dynamic:
            return False
        if spec.dtype != "int" or spec.qscheme != "per_tensor":
            return False
    return is_quantized


def _has_scale_by_channel(plan: Plan, node: Node) -> bool:
    """Return whether the weights of a layer lose no bits if a channel grows."""
    tensor = plan.tensors.get((node.name, "weights"))
    if tensor is None:
        return True
    spec = tensor.spec
    if spec.qscheme != "per_channel":
        return False
    if spec.ch_axis == int(node.row.transposed):
        return True
    # If each group has one channel, the axis of groups is one of channels
    weight = by_channel(node, plan.graph.weight(node))
    _, outputs, inputs, _ = weight.shape
    return spec.ch_axis == 0 and outputs == inputs == 1


def _sizes(node: Node, weight: Tensor, axes: tuple[int, int]) -> Tensor:
    """Return the largest weights along two axes of [groups, outputs, inputs, taps]."""
    return by_channel(node, weight).float().abs().amax(axes).flatten()


def decide_levels(plan: Plan, batches: Iterable[Batch]) -> dict[str, list[int]]:
    """Return the exponents of layers whose channels are levelled; none without data.

    Args:
        plan: of the network, whose graph has the weights.
        batches: calibration data on the graph's device. They are read only if the weights
            suggest that channels may be levelled.

    Raises:
        DataError: the network cannot run a batch.
    """
    pairs = _candidates(plan)
    if not pairs:
        return {}
    graph = plan.graph
    ranges = _channel_ranges(graph, pairs, batches)
    weights = {}
    for pair in pairs:
        weight = loaded(graph.weight(pair.second))
        weights[pair.second.name] = weight.detach()
    exponents = {}
    # Factors of a later pair change how much the channels of an earlier one matter
    for pair in reversed(pairs):
        first = pair.first
        second = pair.second.name
        columns = _sizes(pair.second, weights[second], (1, 3))
        count, _ = channels_of(first, graph.weight(first))
        levels = _exponents(ranges[second], columns, pair, count)
        if not any(levels):
            continue
        exponents[first.name] = levels
        if first.name in weights:
            weight = weights[first.name]
            factors = _factors(levels)
            weights[first.name] = rescale_weight(first, weight, outputs=factors)
    return exponents


def _channel_ranges(
    graph: Graph, pairs: Iterable[LayerPair], batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """Return the largest magnitude of each input channel of second layers, on the CPU."""
    ranges: dict[str, Tensor] = {}

    def watcher(second: Node) -> Callable[[Tensor], None]:
        """Return a function that updates the ranges of a second layer's input."""
        spatial = second.row.spatial or 0

        def update(value: Tensor) -> None:
            """Keep the largest magnitude of each channel."""
            low, high = ends_along(value, value.dim() - 1 - spatial)
            sizes = torch.maximum(low.abs(), high.abs())
            before = ranges.get(second.name, sizes)
            ranges[second.name] = torch.maximum(before, sizes)

        return update

    watchers = {}
    for pair in pairs:
        source = pair.second.operands["input"]
        watchers[source] = watcher(pair.second)
    observe_all(Network(graph), islice(batches, _MAX_BATCHES), watchers, ALONE)
    return ranges


def _exponents(ranges: Tensor, columns: Tensor, pair: LayerPair, count: int) -> list[int]:
    """Return the exponent of each output channel of the first layer.

    Args:
        ranges: of the second layer's input channels.
        columns: the largest weight of each of these channels.
        pair: the layers.
        count: the output channels of the first layer, of which the second may read only some.

    Returns:
        [count] exponents. All are zero if no channel that matters has lost too many bits.
    """
    columns = columns.to(ranges.device)
    origins = torch.tensor(pair.channels)
    zeros = torch.zeros(count)
    sizes = zeros.scatter_reduce(0, origins, ranges, "amax")
    products = zeros.scatter_reduce(0, origins, ranges * columns, "amax")
    largest = products.max()
    is_finite = bool(products.isfinite().all())
    if not is_finite or float(largest) == 0:
        return [0] * count
    widest = sizes.max()
    is_lost = sizes * 2**LOST_BITS < widest
    matters = products * 2**LOST_BITS >= largest
    if not bool((is_lost & matters).any()):
        return [0] * count
    is_heard = products * 2**HEARD_BITS >= largest
    exponents = torch.log2(widest / sizes)
    exponents = exponents.round()
    exponents = torch.where(is_heard, exponents, 0.0)
    exponents = exponents.clamp_max(LARGEST_EXPONENT)
    return [int(exponent) for exponent in exponents.tolist()]


def _factors(exponents: Sequence[int]) -> Tensor:
    """Return powers of two in float32."""
    levels = torch.tensor(exponents, dtype=torch.float32)
    return torch.exp2(levels)


def level_adjustment(graph: Graph, exponents: Exponents) -> Adjustment:
    """Return the weights and biases of all layers that the factors change."""
    changes = Adjustment()
    for pair in find_pairs(graph):
        first = pair.first
        second = pair.second
        if first.name not in exponents:
            continue
        factors = _factors(exponents[first.name])
        factors = factors.to(graph.device)
        weight = parameter(graph, changes, first.name)
        scaled = rescale_weight(first, loaded(weight), outputs=factors)
        scaled = deferred_like(weight, scaled)
        changes = changes.with_parameters(first.name, weight=scaled)
        if "bias" in first.params:
            bias = parameter(graph, changes, first.name, "bias")
            bias = (bias * factors).to(bias.dtype)
            changes = changes.with_parameters(first.name, bias=bias)
        weight = parameter(graph, changes, second.name)
        inverse = 1 / factors[list(pair.channels)]
        scaled = rescale_weight(second, loaded(weight), inputs=inverse)
        scaled = deferred_like(weight, scaled)
        changes = changes.with_parameters(second.name, weight=scaled)
    return changes


def level_sentence(exponents: Exponents) -> str:
    """Return a sentence on the channels that are levelled."""
    largest = 0
    for levels in exponents.values():
        largest = max(largest, *map(abs, levels))
    return (
        f"channels of {first_names(list(exponents), 3)} have ranges too different for one "
        f"scale: they are multiplied by powers of two, up to 2^{largest}, which the next "
        "layer's weights compensate"
    )


POWER_OF_TWO_EQUALIZATION = Decision(
    "levels",
    "the ranges of channels",
    decide=_decide,
    apply=_apply,
    check=_check,
    differences=_differences,
)
