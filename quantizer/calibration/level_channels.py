"""Levels the channels of a value that one scale cannot serve: factors that the next layer's
weights take back.

Where each output of a layer reads one channel alone, as in a depthwise convolution, a channel
that is a thousandth of the widest has no bits left, and nothing else makes up for it. Such a
channel is multiplied with a power of two in the layer that makes it, and divided by it in the
layer that reads it. Powers of two change no float value. Ranges are those of the first
calibration batches, and the factors are recorded in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.config.wording import shortened
from quantizer.graph.edits import by_channel, channels_of, rescaled
from quantizer.graph.ir import Graph, Node
from quantizer.graph.passes.equalization import Pair, find_pairs
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch, naming_batch
from quantizer.storage.deferred_tensor import beside, loaded

CHECKED_BATCHES = 4
"""How many of the first calibration batches say how wide channels are."""
LOST_BITS = 4
"""Channels are levelled where one that matters loses more bits than this on the scale of
all.
"""
HEARD_BITS = 8
"""A channel whose products are this many bits smaller than the largest is left as it is: nobody
hears it.
"""
LARGEST_EXPONENT = 24
"""Levels of more would not leave float32 exact where outputs are added up."""
_WIDE = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes in which powers of two change no digit."""
Exponents = Mapping[str, Sequence[int]]
"""By layer, the power of two that each output channel is multiplied with."""


def candidates(plan: Plan) -> list[Pair]:
    """Return pairs of layers whose channels are read one by one, at scales of their own, from a
    value with one scale.

    There are none if the weights of no first layer are far apart: calibration is not to read
    data in vain.
    """
    graph = plan.graph
    if not any(_reads_one_by_one(graph, node) for node in graph.nodes):
        return []  # without a look at how channels run through the graph
    pairs: list[Pair] = []
    for pair in find_pairs(graph):
        if not _reads_one_by_one(graph, pair.second):
            continue
        has_room = (
            graph.weight(pair.first).dtype in _WIDE and graph.weight(pair.second).dtype in _WIDE
        )
        if has_room and _has_one_scale(plan, pair) and _has_scale_by_channel(plan, pair):
            pairs.append(pair)
    return pairs if any(_is_far_apart(_row_sizes(graph, pair)) for pair in pairs) else []


def _reads_one_by_one(graph: Graph, node: Node) -> bool:
    """Whether each output channel of a layer is of one input channel."""
    return node.is_multiplying and by_channel(node, graph.weight(node)).shape[2] == 1


def _has_one_scale(plan: Plan, pair: Pair) -> bool:
    """Whether the value between two layers is quantized to integers of one scale, which
    calibration finds.
    """
    keys = [(pair.second.name, "input")]
    keys += [(node.name, "activation") for node in (*pair.between, pair.first)]
    tensors = [plan.tensors[key] for key in keys if key in plan.tensors]
    if not tensors:
        return False
    is_free = all(tensor.is_calibrated or tensor.spec.is_dynamic for tensor in tensors)
    return is_free and all(
        tensor.spec.dtype == "int" and tensor.spec.qscheme == "per_tensor" for tensor in tensors
    )


def _has_scale_by_channel(plan: Plan, pair: Pair) -> bool:
    """Whether the weights of both layers lose nothing if a channel grows."""
    for node in (pair.first, pair.second):
        tensor = plan.tensors.get((node.name, "weights"))
        if tensor is None:
            continue
        output_axes = {int(node.row.transposed)}
        _, outputs, inputs, _ = by_channel(node, plan.graph.weight(node)).shape
        if outputs == inputs == 1:
            output_axes.add(0)  # that of the groups, of which each has a channel
        if tensor.spec.qscheme != "per_channel" or tensor.spec.ch_axis not in output_axes:
            return False
    return True


def _row_sizes(graph: Graph, pair: Pair) -> Tensor:
    """The largest weight of each output channel of the first layer."""
    weight = loaded(graph.weight(pair.first)).detach()
    return by_channel(pair.first, weight).float().abs().amax((2, 3)).flatten()


def _column_sizes(weight: Tensor, pair: Pair) -> Tensor:
    """The largest weight of each input channel of the second layer."""
    return by_channel(pair.second, weight).float().abs().amax((1, 3)).flatten()


def _is_far_apart(sizes: Tensor) -> bool:
    """Whether a size above zero has lost more than `LOST_BITS`."""
    return bool(((sizes > 0) & (sizes * 2**LOST_BITS < sizes.max())).any())


def decide(plan: Plan, batches: Iterable[Batch]) -> dict[str, list[int]]:
    """Return the exponents of layers whose channels are levelled.

    Args:
        plan: of the network, whose graph has the weights.
        batches: calibration data on the graph's device. The first `CHECKED_BATCHES` are read if
            any pair of layers is a candidate, else none.

    Raises:
        DataError: the network cannot run a batch.
    """
    pairs = candidates(plan)
    if not pairs:
        return {}
    ranges = _channel_ranges(plan.graph, pairs, batches)
    if not ranges:
        return {}  # observing says that there are no data
    weights = {
        pair.second.name: loaded(plan.graph.weight(pair.second)).detach() for pair in pairs
    }
    exponents: dict[str, list[int]] = {}
    # Factors of a later pair change what the channels of an earlier one are worth
    for pair in reversed(pairs):
        columns = _column_sizes(weights[pair.second.name], pair)
        count, _ = channels_of(pair.first, plan.graph.weight(pair.first))
        levels = _exponents(ranges[pair.second.name], columns, pair, count)
        if not any(levels):
            continue
        exponents[pair.first.name] = levels
        if pair.first.name in weights:
            rows = torch.exp2(torch.tensor(levels, dtype=torch.float32))
            weights[pair.first.name] = rescaled(
                pair.first, weights[pair.first.name], outputs=rows
            )
    return exponents


def _channel_ranges(
    graph: Graph, pairs: Iterable[Pair], batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """The largest magnitude of each input channel of second layers, on the CPU."""
    ranges: dict[str, Tensor] = {}

    def watcher(second: Node) -> Callable[[Tensor], None]:
        axes_behind = second.row.spatial or 0

        def look(value: Tensor) -> None:
            axis = value.dim() - 1 - axes_behind
            others = [other for other in range(value.dim()) if other != axis]
            sizes = value.float().abs().amax(others).cpu()
            ranges[second.name] = torch.maximum(ranges.get(second.name, sizes), sizes)

        return look

    watchers = {pair.second.operands["input"]: watcher(pair.second) for pair in pairs}
    network = Network(graph)
    for number, batch in enumerate(islice(batches, CHECKED_BATCHES)):
        with naming_batch(number), torch.no_grad():
            network.observe(batch.args, batch.kwargs, watchers)
    return ranges


def _exponents(ranges: Tensor, columns: Tensor, pair: Pair, count: int) -> list[int]:
    """The exponent of each of the first layer's `count` output channels, of which the second
    may read some; zeros if no channel that matters has lost too much.
    """
    columns = columns.to(ranges.device)
    origins = torch.tensor(pair.channels)
    sizes = torch.zeros(count).scatter_reduce(0, origins, ranges, "amax")
    products = torch.zeros(count).scatter_reduce(0, origins, ranges * columns, "amax")
    if not bool(products.isfinite().all()) or float(products.max()) == 0:
        return [0] * count
    widest = sizes.max()
    is_lost = sizes * 2**LOST_BITS < widest
    matters = products * 2**LOST_BITS >= products.max()
    if not bool((is_lost & matters).any()):
        return [0] * count
    is_heard = products * 2**HEARD_BITS >= products.max()
    exponents = torch.where(is_heard, torch.log2(widest / sizes).round(), 0.0).clamp_max(
        LARGEST_EXPONENT
    )
    return [int(exponent) for exponent in exponents.tolist()]


def adjustment(graph: Graph, exponents: Exponents) -> Adjustment:
    """Return the weights and biases of all layers that the factors change."""
    changes = Adjustment()
    for pair in find_pairs(graph):
        if pair.first.name not in exponents:
            continue
        level = torch.tensor(exponents[pair.first.name], dtype=torch.float32)
        factors = torch.exp2(level).to(graph.device)
        first = _parameter(graph, changes, pair.first, "weight")
        scaled_first = rescaled(pair.first, loaded(first), outputs=factors)
        changes = changes.with_parameters(pair.first.name, weight=beside(first, scaled_first))
        if "bias" in pair.first.params:
            bias = loaded(_parameter(graph, changes, pair.first, "bias"))
            changes = changes.with_parameters(
                pair.first.name, bias=(bias * factors).to(bias.dtype)
            )
        second = _parameter(graph, changes, pair.second, "weight")
        scaled_second = rescaled(
            pair.second, loaded(second), inputs=1 / factors[list(pair.channels)]
        )
        changes = changes.with_parameters(
            pair.second.name, weight=beside(second, scaled_second)
        )
    return changes


def _parameter(graph: Graph, changes: Adjustment, node: Node, key: str) -> Tensor:
    """A layer's parameter with the changes so far."""
    changed = changes.parameters.get(node.name, {}).get(key)
    return graph.tensors[node.params[key]].detach() if changed is None else changed


def sentence(exponents: Exponents) -> str:
    """Return what the user should hear of levelled channels."""
    largest = max(max(map(abs, row)) for row in exponents.values())
    return (
        f"the channels of {shortened(list(exponents), 3)} have ranges too different for one "
        f"scale: they are multiplied with powers of two, up to 2^{largest}, which the weights "
        "of the next layer take back"
    )
