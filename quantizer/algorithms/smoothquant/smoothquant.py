"""SmoothQuant: move what makes activations hard to quantize into the weights, by a factor for
each input channel.

The factor is s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), the paper's equation 4. Inputs are
divided by it and weights multiplied, so the float network stays the same.

Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for
Large Language Models" (arXiv 2211.10438), section 4.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig
from quantizer.comparison.extents import ends_along
from quantizer.config.json_types import JsonObject
from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.config.wording import counted, first_names
from quantizer.distributed import ALONE, Ranks
from quantizer.graph.edits import by_channel, rescale_weight
from quantizer.graph.structure.definitions import InputGroup
from quantizer.graph.structure.find import find_structure
from quantizer.layerwise.adjustment import Adjustment, Remark, Task, apply_adjustment
from quantizer.layerwise.fold import (
    admissible,
    fold_factors,
    input_name,
    parameter,
    shared_folds,
    without_insertions,
)
from quantizer.layerwise.gram import geometry, not_finite_input, observe_all
from quantizer.layerwise.patches import by_input, patches, position_count, weight_matrix
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams, sampled_rows
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import bits_of
from quantizer.numerics.qparams import qparams_from_range
from quantizer.observers import NonFiniteError, code_range_of
from quantizer.plan.fit.fitted_config import can_rescale, input_spec
from quantizer.plan.fit.fitted_layers import behind_norms
from quantizer.plan.fit.fitting import Fitting

_SAMPLED_INPUTS = 512
"""Inputs of a layer that the search for alpha looks at: rows, or patches of a convolution."""
_MIN_WEIGHT = 1e-5  # so that a column of zeros has a factor
_AUTO_ALPHAS = [step / 10 for step in range(11)]
_NOT_RESCALED = "no token of the calibration data reached it; its inputs are not rescaled"


def smoothquant(task: Task, settings: SmoothQuantConfig, adjustment: Adjustment) -> Adjustment:
    """Rescale the input channels of all groups with quantized weights or inputs, after one pass
    over the data.

    Maxima are over all tokens and all layers of a group. The factor of a channel that is always
    zero is 1. Of several alphas, each group gets the one with the least error of its outputs on
    a sample of tokens.

    Raises:
        DataError: a value in the network is not finite; layer and batch are named.
    """
    is_smoothed = partial(_is_smoothed, task)
    all_groups, _ = shared_folds(task.graph, task.structure.groups, is_smoothed, adjustment)
    if not settings.online and not task.done:
        smoothed = [group for group in all_groups if is_smoothed(group)]
        all_groups, remarks = without_insertions(smoothed, adjustment)
        adjustment = adjustment.with_remarks(*remarks)
    groups = [group for group in all_groups if is_smoothed(group)]
    if task.done or not groups:
        # All groups are done in one pass, so an interrupted run has done all or none
        return adjustment
    alphas = _alphas(settings)
    for group, ranges in _observed(task, adjustment, groups, with_sample=len(alphas) > 1):
        if ranges.tokens == 0:
            remarks = [Remark(name, _NOT_RESCALED) for name in group.layers]
            adjustment = adjustment.with_remarks(*remarks)
            continue
        max_w = _max_weights(task, group, adjustment)
        foldable = admissible(task.graph, group, adjustment)
        least = settings.scale_clamp_min
        choices = [foldable(_factors(ranges.size, max_w, alpha, least)) for alpha in alphas]
        best = choices[0]
        if len(choices) > 1:
            losses = [
                smoothing_loss(task, group, ranges, factors=s, adjustment=adjustment)
                for s in choices
            ]
            best = choices[losses.index(min(losses))]
        adjustment = fold_factors(task.graph, group, best, adjustment)
    task.after_group(adjustment, len(task.structure.groups))
    return adjustment


def _alphas(settings: SmoothQuantConfig) -> list[float]:
    if settings.alpha == "auto":
        return _AUTO_ALPHAS
    if isinstance(settings.alpha, list):
        return settings.alpha
    return [settings.alpha]


def _is_smoothed(task: Task, group: InputGroup) -> bool:
    """Check whether anything of the group is quantized, and its weights are its own."""
    if group.tied or group.is_fixed:
        return False
    specs = [task.specs.get((layer, "weights")) for layer in group.layers]
    specs += [_input_spec(task, layer) for layer in group.layers]
    return any(spec is not None and spec.dtype != "float32" for spec in specs)


def _observed(
    task: Task, adjustment: Adjustment, groups: Sequence[InputGroup], *, with_sample: bool
) -> list[tuple[InputGroup, ChannelRanges]]:
    """Return each group with the ranges of what it reads, over all batches."""
    network = Network(apply_adjustment(task.graph, adjustment))
    observed = []
    readers: dict[str, list[ChannelRanges]] = {}
    for group in groups:
        ranges = ChannelRanges(network, group, with_sample=with_sample)
        observed.append((group, ranges))
        readers.setdefault(input_name(group, adjustment), []).append(ranges)
    watch = {name: _adding(of_readers) for name, of_readers in readers.items()}
    # One rank sees all batches if the sample is to be spread evenly over them
    ranks = ALONE if with_sample else task.ranks
    observe_all(network, task.batches(), watch, ranks)
    for group, ranges in observed:
        ranges.merge(ranks, f"the ranges that {group.layers[0]} reads")
    return observed


def _adding(readers: Sequence[ChannelRanges]) -> Callable[[Tensor], None]:
    def add(x: Tensor) -> None:
        for ranges in readers:
            ranges.add(x)

    return add


def _max_weights(task: Task, group: InputGroup, adjustment: Adjustment) -> Tensor:
    """Return max|W_j| of each input channel j, over all layers that read the value."""
    layers = [*group.layers]
    if group.fold is not None:
        layers += [name for name in group.fold.extra if (name, "weights") in task.specs]
    maxima = []
    for name in layers:
        weight = parameter(task.graph, adjustment, name)
        table = by_channel(task.graph.by_name[name], weight)
        by_row = table.float().abs().amax((1, 3))
        # Experts share channels
        maxima.append(by_row.view(-1, group.channels).amax(0))
    return torch.stack(maxima).amax(0)


def _factors(max_x: Tensor, max_w: Tensor, alpha: float, least: float) -> Tensor:
    """Return s of equation 4.

    >>> _factors(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 4.0]), 0.5, 1e-3).tolist()
    [2.0, 1.0]
    """
    s = max_x**alpha / max_w.clamp_min(_MIN_WEIGHT) ** (1 - alpha)
    return torch.where(max_x > 0, s.clamp_min(least), 1.0)


def _input_spec(task: Task, layer: str) -> QuantizationSpec | None:
    """Return how the value that a layer reads is quantized: at the layer itself, or where the
    value was made.
    """
    spec = task.specs.get((layer, "input"))
    node = task.graph.by_name[layer]
    while spec is None:
        source = next(iter(node.refs()), None)
        if source is None:
            return None
        spec = task.specs.get((source, "activation"))
        node = task.graph.by_name[source]
        if spec is None and node.row.kind != "passthrough":
            return None
    return spec


def smoothing_loss(
    task: Task,
    group: InputGroup,
    ranges: ChannelRanges,
    *,
    factors: Tensor,
    adjustment: Adjustment,
) -> float:
    """Return the squared error of the group's outputs on the sample, with its inputs divided by
    the factors, and weights and inputs quantized.
    """
    total = 0.0
    rows = sum(len(parameter(task.graph, adjustment, name)) for name in group.layers)
    for name in group.layers:
        node = task.graph.by_name[name]
        layer = ranges.layers[name]
        spec = task.specs.get((name, "weights"))
        weight = parameter(task.graph, adjustment, name).float()
        share = 1.0
        if spec is not None:
            weight, share = sampled_rows(weight, spec, node, rows)
        scaled = rescale_weight(node, weight, inputs=factors)
        quantized = scaled
        if spec is not None and spec.dtype in CAST_ONLY:
            quantized = TensorQuantizer(spec)(scaled)
        elif spec is not None:
            quantized = nearest(scaled, spec, nearest_qparams(spec, scaled))
        x = ranges.sample(name)
        divided = x / by_input(factors, len(x), x.shape[2])[:, None]
        quantized_x = _quantized_input(divided, _input_spec(task, name), ranges, factors)
        outputs = x @ weight_matrix(layer, weight).mT
        lost = quantized_x @ weight_matrix(layer, quantized).mT - outputs
        total += share * float(lost.square_().sum(dtype=torch.float64))
    return total


def _quantized_input(
    x: Tensor, spec: QuantizationSpec | None, ranges: ChannelRanges, factors: Tensor
) -> Tensor:
    """Quantize rows of inputs [groups, samples, depth] with the one scale that calibration
    would find, or with that of each row.
    """
    if spec is None:
        return x
    if not spec.is_scaled:
        return TensorQuantizer(spec)(x)  # type: ignore[no-any-return]
    if spec.is_dynamic and spec.qscheme != "per_tensor":
        # The calibrated scale of a tensor in groups would be that of its largest value
        by_row = dataclasses.replace(spec, qscheme="per_token", ch_axis=2)
        if spec.group_size:
            by_row = dataclasses.replace(spec, qscheme="per_group", ch_axis=2)
        return TensorQuantizer(by_row)(x)  # type: ignore[no-any-return]
    low = ranges.low / factors
    high = ranges.high / factors
    whole = dataclasses.replace(spec, qscheme="per_tensor", ch_axis=None, group_size=None)
    return nearest(x, whole, qparams_from_range(low.amin(), high.amax(), code_range_of(whole)))


class ChannelRanges:
    """Collects the range of each channel of the value that a group reads, batch by batch.

    Attributes:
        layers: of the group, by name.
        low, high: float32 [channels].
        tokens: how many there were.
    """

    def __init__(self, network: Network, group: InputGroup, *, with_sample: bool) -> None:
        self._group = group
        self.tokens = 0
        self.layers = {name: network.layers[name] for name in group.layers}
        device = self.layers[group.layers[0]].get_parameter("weight").device
        self.low = torch.full((group.channels,), math.inf, device=device)
        self.high = -self.low
        self._samples: dict[object, _SampledInputs] = {}
        if with_sample:
            for layer in self.layers.values():
                self._samples[geometry(layer)] = _SampledInputs(layer)

    @property
    def size(self) -> Tensor:
        """Return max|X_j| of each channel j."""
        return torch.maximum(-self.low, self.high)

    def sample(self, layer: str) -> Tensor:
        """Return some of a layer's inputs, evenly over the batches: [groups, at most
        `_SAMPLED_INPUTS`, depth].
        """
        return self._samples[geometry(self.layers[layer])].rows()

    def add(self, x: Tensor) -> None:
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        if x.numel() == 0:
            return
        low, high = ends_along(x, self._group.axis)
        if not math.isfinite(low.sum()) or not math.isfinite(high.sum()):
            raise not_finite_input(self._group.layers[0], NonFiniteError(x))
        self.low = torch.minimum(self.low, low.to(self.low.device))
        self.high = torch.maximum(self.high, high.to(self.high.device))
        self.tokens += x.numel() // self._group.channels
        for sample in self._samples.values():
            sample.add(x)

    def merge(self, ranks: Ranks, place: str) -> None:
        """Take in the ranges that the other ranks have seen."""
        gathered = ranks.gather((self.low, self.high, self.tokens), place)
        lows, highs, tokens = zip(*gathered, strict=True)
        self.low = torch.stack(lows).amin(0)
        self.high = torch.stack(highs).amax(0)
        self.tokens = sum(tokens)


class _SampledInputs:
    """Keeps every n-th row that a layer multiplies its weight with; n doubles when there are
    twice too many.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._stride = 1
        self._seen = 0
        self._rows: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Take in one batch."""
        count = position_count(self._layer, x)
        first = -self._seen % self._stride
        self._seen += count
        positions = torch.arange(first, count, self._stride, device=x.device)
        if len(positions):
            self._rows.append(patches(self._layer, x, positions).float())
        while sum(part.shape[1] for part in self._rows) > 2 * _SAMPLED_INPUTS:
            self._rows = [torch.cat(self._rows, 1)[:, ::2]]
            self._stride *= 2

    def rows(self) -> Tensor:
        """Return the rows, evenly strided if there are too many."""
        rows = torch.cat(self._rows, 1)
        stride = -(-rows.shape[1] // _SAMPLED_INPUTS)
        return rows[:, ::stride]


_SMOOTHED_BITS = 8
_SMOOTHQUANT = {"name": "smoothquant", "alpha": 0.5, "scale_clamp_min": 0.001}
"""The entry of the preset smoothquant_int8."""


def smooth_normalized_inputs(fitting: Fitting) -> None:
    """Add SmoothQuant where linear layers read a normalization through one static scale."""
    algorithms = fitting.config.algorithms
    is_rescaled = any(algorithm.stage == "rescale" for algorithm in algorithms)
    if fitting.is_for_dpu or is_rescaled:
        return
    layers = []
    for layer in behind_norms(fitting.graph):
        spec = input_spec(fitting.plan, layer)
        if spec is not None and _has_one_static_scale(spec):
            layers.append(layer)
    if not layers:
        return
    groups = find_structure(fitting.graph).groups
    rescalable = set(chain(*(group.layers for group in groups if can_rescale(group))))
    if rescalable.isdisjoint(layers):
        return
    key = "algorithms"
    if fitting.is_hierarchical:
        key = "pre_quant_opt_config"
    names = first_names(fitting.names(layers), 2)
    fitting.change(
        _with_smoothquant(fitting.document, key),
        f"smoothquant added to {key}: {counted(len(layers), 'linear layer')} behind a "
        f"normalization ({names}), where a few channels are far larger than the others and one "
        "static range leaves few codes for these",
    )


def _with_smoothquant(document: JsonObject, key: str) -> JsonObject:
    """Return the document with SmoothQuant before the other algorithms of a key.

    The hierarchical form is for checkpoints, which have no place for operators that it would
    insert.
    """
    changed = copy.deepcopy(document)
    entry: JsonObject = dict(_SMOOTHQUANT)
    others = changed.get(key) or []
    if isinstance(others, dict):
        others = [others]
    changed[key] = [entry, *others]
    if key == "pre_quant_opt_config":
        entry["online"] = False
        if not others:
            changed[key] = entry
    return changed


def _has_one_static_scale(spec: QuantizationSpec) -> bool:
    is_static = spec.is_scaled and not spec.is_dynamic
    return is_static and spec.qscheme == "per_tensor" and bits_of(spec) <= _SMOOTHED_BITS
