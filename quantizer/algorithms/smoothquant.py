"""SmoothQuant: moves what makes activations hard to quantize into the weights, by a factor for
each input channel.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", 2022.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.algorithms.adjustment import Adjustment, Remark, Task, adjusted
from quantizer.algorithms.fold import admissible, folded, input_name, parameter, shared_folds
from quantizer.algorithms.gram import geometry, not_finite
from quantizer.algorithms.patches import (
    by_input,
    channel_rows,
    is_linear,
    patches,
    weight_matrix,
)
from quantizer.algorithms.round_to_nearest import nearest, nearest_qparams, sampled_rows
from quantizer.config.algorithms import SmoothQuantConfig
from quantizer.config.model import CAST_ONLY, QuantizationSpec
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.graph.edits import by_channel, rescaled
from quantizer.graph.structure import InputGroup
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.qparams import QParams, qparams_from_range
from quantizer.observers import NonFiniteError, code_range_of
from quantizer.sources.batches import naming_batch

SAMPLE = 512
"""Inputs of a layer that a search looks at: rows, or patches of a convolution."""
LEAST_WEIGHT = 1e-5  # so that a column of zeros has a factor
AUTO = [step / 10 for step in range(11)]
UNREACHED = "no token of the calibration data reached it; its inputs are not rescaled"


def smoothquant(task: Task, settings: SmoothQuantConfig, found: Adjustment) -> Adjustment:
    """Rescale the input channels of all groups with quantized weights or inputs, after one pass
    over the data.

    Factors are max|X_j|^alpha / max|W_j|^(1 - alpha) (section 4, equation 4), over all tokens
    and all layers of a group; 1 for channels that are always zero. Of several alphas, each
    group takes the one with the least error of its outputs on a sample of tokens.

    Raises:
        DataError: a value in the network is not finite; layer and batch are named.
    """
    concerned = partial(_concerned, task)
    found_groups, _ = shared_folds(task.graph, task.structure.groups, concerned, found)
    groups = list(filter(concerned, found_groups))
    if task.done or not groups:
        return found  # all groups are found in one pass, so there is no half of it
    alphas = AUTO if settings.alpha == "auto" else settings.alpha
    alphas = alphas if isinstance(alphas, list) else [alphas]
    for group, seen in _observed(task, found, groups, with_sample=len(alphas) > 1):
        if seen.tokens == 0:
            found = found.with_remarks(*(Remark(name, UNREACHED) for name in group.layers))
            continue
        others = group.fold.extra if group.fold else ()
        layers = (*group.layers, *(name for name in others if (name, "weights") in task.specs))
        tables = (
            by_channel(task.graph.by_name[name], parameter(task.graph, found, name))
            for name in layers
        )
        # Max|W_j|
        columns = torch.stack([_largest(table, group.channels) for table in tables]).amax(0)
        foldable, least = admissible(task.graph, group, found), settings.scale_clamp_min
        choices = [foldable(_factors(seen.size, columns, alpha, least)) for alpha in alphas]
        best = choices[0]
        if len(choices) > 1:
            best = min(
                choices, key=lambda factors: smoothing_loss(task, group, seen, found, factors)
            )
        found = folded(task.graph, group, best, found)
    task.after_group(found, len(task.structure.groups))
    return found


def _concerned(task: Task, group: InputGroup) -> bool:
    """Whether anything of the group is quantized, and its weights are its own."""
    if group.tied or group.is_fixed:
        return False
    weights = [task.specs.get((layer, "weights")) for layer in group.layers]
    inputs = [input_spec(task, layer) for layer in group.layers]
    return any(spec is not None and spec.dtype != "float32" for spec in (*weights, *inputs))


def _observed(
    task: Task, found: Adjustment, groups: Sequence[InputGroup], *, with_sample: bool
) -> list[tuple[InputGroup, ChannelRanges]]:
    """What each group reads, over all batches."""
    network = Network(adjusted(task.graph, found))
    ranges = [
        (group, ChannelRanges(network, group, with_sample=with_sample)) for group in groups
    ]
    readers: dict[str, list[ChannelRanges]] = {}
    for group, each in ranges:
        readers.setdefault(input_name(group, found), []).append(each)

    def adding(those: list[ChannelRanges]) -> Callable[[Tensor], None]:
        def add(x: Tensor) -> None:
            for each in those:
                each.add(x)

        return add

    watch = {name: adding(those) for name, those in readers.items()}
    number = -1
    # A sample is evenly over the batches of one rank
    ranks = ALONE if with_sample else task.ranks
    for number, batch in enumerate(task.batches()):
        if ranks.owns(number):
            with naming_batch(number), torch.no_grad():
                network.observe(batch.args, batch.kwargs, watch)
    if number < 0:
        raise DataError(
            "the calibration data has no batches", help="check --data and --subset_len"
        )
    for group, each in ranges:
        each.merge(ranks, f"the ranges that {group.layers[0]} reads")
    return ranges


def _largest(table: Tensor, channels: int) -> Tensor:
    """The largest magnitude of the weights of each input channel; experts share channels."""
    return table.float().abs().amax((1, 3)).view(-1, channels).amax(0)


def _factors(inputs: Tensor, columns: Tensor, alpha: float, least: float) -> Tensor:
    """Equation 4.

    >>> _factors(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 4.0]), 0.5, 1e-3).tolist()
    [2.0, 1.0]
    """
    factors = inputs**alpha / columns.clamp_min(LEAST_WEIGHT) ** (1 - alpha)
    return torch.where(inputs > 0, factors.clamp_min(least), 1.0)


def input_spec(task: Task, layer: str) -> QuantizationSpec | None:
    """How the value that a layer reads is quantized: at the layer itself, or where the value
    was made.
    """
    own = task.specs.get((layer, "input"))
    node = task.graph.by_name[layer]
    while own is None:
        source = next(iter(node.refs()), None)
        if source is None:
            return None
        own, node = task.specs.get((source, "activation")), task.graph.by_name[source]
        if own is None and node.row.kind != "passthrough":
            return None
    return own


def smoothing_loss(
    task: Task, group: InputGroup, seen: ChannelRanges, found: Adjustment, factors: Tensor
) -> float:
    """Squared error of the group's outputs on the sample, its inputs divided by the factors,
    and all quantized.
    """
    total = 0.0
    rows = sum(len(parameter(task.graph, found, name)) for name in group.layers)
    for name in group.layers:
        node, spec = task.graph.by_name[name], task.specs.get((name, "weights"))
        weight, share = parameter(task.graph, found, name).float(), 1.0
        if spec is not None:
            weight, share = sampled_rows(weight, spec, node, rows)
        scaled = rescaled(node, weight, inputs=factors)
        quantized = scaled
        if spec is not None and spec.dtype in CAST_ONLY:
            quantized = TensorQuantizer(spec)(scaled)
        elif spec is not None:
            quantized = nearest(scaled, spec, nearest_qparams(spec, scaled))
        inputs = seen.sample(name)
        divided = inputs / by_input(factors, len(inputs), inputs.shape[2])[:, None]
        rounded = _quantized_input(divided, input_spec(task, name), seen, factors)
        outputs = inputs @ weight_matrix(seen.layers[name], weight).mT
        lost = rounded @ weight_matrix(seen.layers[name], quantized).mT - outputs
        total += share * float(lost.square_().sum(dtype=torch.float64))
    return total


def _quantized_input(
    x: Tensor, spec: QuantizationSpec | None, seen: ChannelRanges, factors: Tensor
) -> Tensor:
    """Rows of inputs [groups, samples, depth] with the scale that calibration would find, or
    with that of each row.
    """
    if spec is None:
        return x
    if not spec.is_scaled:
        return TensorQuantizer(spec)(x)  # type: ignore[no-any-return]
    if spec.is_dynamic and spec.qscheme != "per_tensor":
        by_row = dataclasses.replace(
            spec, qscheme="per_group" if spec.group_size else "per_token", ch_axis=2
        )
        return TensorQuantizer(by_row)(x)  # type: ignore[no-any-return]
    low, high = seen.low / factors, seen.high / factors
    if spec.qscheme == "per_channel":
        qparams = qparams_from_range(low, high, code_range_of(spec))
        scale, zero_point = (
            by_input(e, len(x), x.shape[2]).flatten()
            for e in (qparams.scale, qparams.zero_point)
        )
        wide = x.transpose(0, 1).flatten(1)
        placed = nearest(wide, dataclasses.replace(spec, ch_axis=1), QParams(scale, zero_point))
        return placed.view(x.shape[1], len(x), -1).transpose(0, 1)
    whole = dataclasses.replace(spec, qscheme="per_tensor", ch_axis=None, group_size=None)
    return nearest(x, whole, qparams_from_range(low.amin(), high.amax(), code_range_of(whole)))


class ChannelRanges:
    """Takes in the value that a group reads, batch by batch.

    Attributes:
        layers: of the group, by name.
        low, high: float32 [channels].
        tokens: how many there were.
    """

    def __init__(self, network: Network, group: InputGroup, *, with_sample: bool) -> None:
        self._group, self.tokens = group, 0
        device = network.layers[group.layers[0]].get_parameter("weight").device
        self.low = torch.full((group.channels,), math.inf, device=device)
        self.high = -self.low
        self.layers = {name: network.layers[name] for name in group.layers}
        kinds = {geometry(layer): layer for layer in self.layers.values()}
        self._samples = (
            {kind: _Sample(layer) for kind, layer in kinds.items()} if with_sample else {}
        )

    @property
    def size(self) -> Tensor:
        """The largest magnitude of each channel."""
        return torch.maximum(-self.low, self.high)

    def sample(self, layer: str) -> Tensor:
        """Some of a layer's inputs, evenly over the batches: [groups, at most SAMPLE,
        depth].
        """
        return self._samples[geometry(self.layers[layer])].rows()

    def add(self, x: Tensor) -> None:
        """Take in one batch.

        Raises:
            DataError: it is not finite; the layer is named.
        """
        if x.numel() == 0:
            return
        low, high = _extremes(x, self._group.axis)
        if not math.isfinite(low.sum()) or not math.isfinite(high.sum()):
            error = NonFiniteError(int(x.isnan().sum()), int(x.isinf().sum()), x.numel())
            raise not_finite(self._group.layers[0], error)
        self.low, self.high = (
            torch.minimum(self.low, low.float()),
            torch.maximum(self.high, high.float()),
        )
        self.tokens += x.numel() // self._group.channels
        for sample in self._samples.values():
            sample.add(x)

    def merge(self, ranks: Ranks, place: str) -> None:
        """Take in the ranges that the other ranks have seen."""
        lows, highs, tokens = zip(
            *ranks.gather((self.low, self.high, self.tokens), place), strict=True
        )
        self.low, self.high, self.tokens = (
            torch.stack(lows).amin(0),
            torch.stack(highs).amax(0),
            sum(tokens),
        )


def _extremes(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each index of an axis."""
    if axis % x.dim() == x.dim() - 1:
        rows = x.reshape(-1, x.shape[-1])
        return rows.amin(0), rows.amax(0)
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    return x.amin(others), x.amax(others)


class _Sample:
    """Every n-th row that a layer multiplies its weight with; n doubles when there are twice
    too many.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._stride, self._seen = layer, 1, 0
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        rows = self._rows_of(x)
        first = -self._seen % self._stride
        self._seen += rows
        at = torch.arange(first, rows, self._stride, device=x.device)
        if len(at):
            self._kept.append(patches(self._layer, x, at).float())
        while sum(part.shape[1] for part in self._kept) > 2 * SAMPLE:
            self._kept, self._stride = [torch.cat(self._kept, 1)[:, ::2]], 2 * self._stride

    def rows(self) -> Tensor:
        found = torch.cat(self._kept, 1)
        return found[:, :: -(-found.shape[1] // SAMPLE)]

    def _rows_of(self, x: Tensor) -> int:
        """How many rows the layer makes of a value."""
        if is_linear(self._layer):
            return x.numel() // x.shape[-1]
        like = torch.empty_like(x, device="meta")
        weights = {name: tensor.to("meta") for name, tensor in self._layer.named_parameters()}
        return len(
            channel_rows(self._layer, torch.func.functional_call(self._layer, weights, (like,)))
        )
