"""AWQ: round important input channels more finely, by a factor for each channel.

Weights are multiplied by the factor and inputs are divided by it, so the float network stays
the same. Then ranges of weights shrink where that makes the error smaller.

The factor of a channel is s = s_X^alpha, and alpha is searched for each group of layers. s_X is
the root mean square of the channel's values; the paper has the mean magnitude. The root mean
square is on the diagonal of the inputs' Gram matrix, which also gives the error of the outputs,
so that the network runs only once.

Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration" (arXiv 2306.00978), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.algorithms.awq.settings import AWQConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import rescale_weight
from quantizer.graph.ir import Node
from quantizer.graph.structure.definitions import InputGroup
from quantizer.layerwise.adjustment import (
    Adjustment,
    Remark,
    RoundedWeight,
    Task,
    apply_adjustment,
)
from quantizer.layerwise.clip_search import (
    ClipSearch,
    clip_shares,
    few_clip_shares,
    has_row_scales,
)
from quantizer.layerwise.fold import (
    admissible,
    factored_apart,
    fold_factors,
    parameter,
    shared_folds,
    without_insertions,
)
from quantizer.layerwise.gram import (
    DEEPEST,
    TOO_DEEP,
    UNREACHED,
    GroupSums,
    deepest,
    quantized_layers,
    watching,
    zero_channels,
)
from quantizer.layerwise.patches import weight_matrix
from quantizer.layerwise.round_to_nearest import (
    layer_qparams,
    nearest,
    output_error,
    sampled_rows,
    steps_before_rounding,
    super_block_remarks,
)
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.nn.network import Network

_MIN_FACTOR = 1e-4


def awq(task: Task, settings: AWQConfig, adjustment: Adjustment) -> Adjustment:
    """Rescale the input channels of each group of layers, and find the scales of its weights.

    Weights are rounded to nearest with these scales. A rounding algorithm that runs later uses
    `qparams`. The inputs are those of the network before AWQ, without later folds.

    Raises:
        DataError: a value in the network, or a weight, is not finite; it is named.
    """
    return _Search(task, settings, adjustment).run()


class _Search:
    """Searches group by group. A group is rounded once no later one changes its weights."""

    def __init__(self, task: Task, settings: AWQConfig, adjustment: Adjustment) -> None:
        self.task = task
        self.settings = settings
        self.adjustment = adjustment
        if not task.done:
            self.adjustment = adjustment.with_remarks(*super_block_remarks(task))
        before = task.before if task.done else adjustment
        self.groups, self.leads = shared_folds(
            task.graph,
            task.structure.groups,
            lambda group: bool(quantized_layers(task, group)),
            before,
        )
        if not settings.online:
            rescaled = settings.scale_search and not task.done
            self.groups, remarks = without_insertions(self.groups, before)
            if rescaled:
                self.adjustment = self.adjustment.with_remarks(*remarks)
        for group in self.groups:
            for name in quantized_layers(task, group):
                weight = parameter(task.graph, adjustment, name)
                layer_qparams(name, task.specs[name, "weights"], weight)  # raises the DataError
        self.runner = SequentialRunner(
            Network(apply_adjustment(task.graph, before)),
            task.batches(),
            ActivationStore(task.memory),
            ranks=task.ranks,
            together=True,
        )
        self.layers = self.runner.network.layers

    def run(self) -> Adjustment:
        """Search all groups, except those that an interrupted run has done."""
        waiting: dict[int, GroupSums] = {}
        factors: dict[int, Tensor] = {}
        for number, group in enumerate(self.groups):
            if number < self.task.done:
                continue
            sums = self._gather(quantized_layers(self.task, group))
            if sums is not None:
                waiting[number] = sums
                factors[number] = self._rescale(group, sums)
            changed_later: set[str] = set()
            for later in self.groups[number + 1 :]:
                if later.fold is not None:
                    changed_later.update((later.fold.node, *later.fold.extra))
            for ready in [*waiting]:
                if changed_later.isdisjoint(waiting[ready].layers):
                    lead = self.leads.get(ready, ready)
                    self._round(waiting.pop(ready), factors.get(lead, factors[ready]))
            is_shared = any(lead <= number < other for other, lead in self.leads.items())
            if not waiting and not is_shared:
                self.task.after_group(self.adjustment, number + 1)
        return self.adjustment

    def _gather(self, layers: Sequence[str]) -> GroupSums | None:
        """Run up to the value that the layers read, and return the sums of its products; None
        if these say nothing.
        """
        if not layers:
            return None
        if deepest(self.runner.network, layers) > DEEPEST:
            self._remark(layers, TOO_DEEP)
            return None
        sums = GroupSums(self.runner.network, layers)
        self.runner.advance(*watching(self.runner.network, layers[0], sums.add))
        sums.merge(self.task.ranks)
        if sums.tokens == 0:
            self._remark(layers, UNREACHED)
            return None
        for text in sums.unrouted:
            self._remark(layers, text)
        return sums

    def _rescale(self, group: InputGroup, sums: GroupSums) -> Tensor:
        """Find the group's factors s, fold them into the network, and return them."""
        s_x = sums.channel_size(
            group.channels, by_expert=factored_apart(self.task.graph, group)
        )
        counts = (s_x.view(-1, group.channels) == 0).sum(1).tolist()
        if len(counts) > 1:
            # An expert without any token is not meant
            counts = [count for count in counts if count < group.channels]
        if sum(counts):
            self._remark(sums.layers, zero_channels(sum(counts)))
        ones = torch.ones_like(s_x)
        if group.tied or group.is_fixed or not self.settings.scale_search:
            return ones
        samples = self._samples(sums)
        is_exact = all(sample.is_exact for sample in samples)
        foldable = admissible(self.task.graph, group, self.adjustment)

        def factors(step: int) -> Tensor:
            alpha = step / self.settings.grid
            return foldable(_factors(s_x, alpha, group.channels))

        def loss(step: int) -> float:
            """Return the squared error of the sampled rows with the factors of a step."""
            s = factors(step)
            clip = self.settings.clip_search
            error = sum(sample.loss(sums, s, clip=clip) for sample in samples)
            if step == 0 and clip and not is_exact:
                # Clipping may do harm where errors are not exact
                unclipped = sum(sample.loss(sums, ones, clip=False) for sample in samples)
                error = min(error, unclipped)
            return error

        s = factors(least_step(loss, self.settings.grid))
        if not torch.equal(s, ones):
            self.adjustment = fold_factors(self.task.graph, group, s, self.adjustment)
        return s

    def _samples(self, sums: GroupSums) -> list[_SampledRows]:
        """Return rows of the weights of the group's layers. Layers of one spec are put
        together, as a call costs more than its rows.
        """
        weights: dict[str, Tensor] = {}
        together: dict[Any, list[str]] = {}
        for name in sums.layers:
            weights[name] = parameter(self.task.graph, self.adjustment, name)
            spec = self.task.specs[name, "weights"]
            is_alone = spec.scale_type == "e4m3" or not has_row_scales(self.layers[name], spec)
            key = name if is_alone else spec
            together.setdefault(key, []).append(name)
        total = sum(len(weight) for weight in weights.values())
        samples = []
        for names in together.values():
            node = self.task.graph.by_name[names[0]]
            spec = self.task.specs[names[0], "weights"]
            rows = [sampled_rows(weights[name], spec, node, total)[0] for name in names]
            sample = torch.cat([part.float() for part in rows])
            count = sum(len(weights[name]) for name in names)
            layer = self.layers[names[0]]
            samples.append(_SampledRows(node, layer, spec, sample, count / len(sample)))
        return samples

    def _round(self, sums: GroupSums, factors: Tensor) -> None:
        """Find the scales of a group's layers, and round their weights to nearest."""
        sums.divide(factors)
        steps = steps_before_rounding(self.task, self.adjustment, sums.layers)
        for name in sums.layers:
            rounded = self._rounded(name, sums, factors, steps.get(name))
            if rounded.after > rounded.before:
                ratio = rounded.after / max(rounded.before, 1e-30)
                text = f"its error is {ratio:.2f} times that of round-to-nearest"
                if len(sums.layers) > 1:
                    text += "; other layers gain more"
                remark = Remark(name, text, is_warning=False)
                self.adjustment = self.adjustment.with_remarks(remark)
            qparams = {**self.adjustment.qparams, name: rounded.qparams}
            with_rounded = self.adjustment.with_rounded({name: rounded})
            self.adjustment = replace(with_rounded, qparams=qparams)

    def _rounded(
        self, name: str, sums: GroupSums, factors: Tensor, shared_step: float | None
    ) -> RoundedWeight:
        """Round the weight of a layer, rescaled by the factors, to nearest.

        Args:
            name: of the layer.
            sums: of the inputs of its group, which the factors have divided.
            factors: float32 [inputs], by which the weight is multiplied.
            shared_step: the largest step of the layers that share its scale, if there are some.
        """
        spec = self.task.specs[name, "weights"]
        layer = self.layers[name]
        node = self.task.graph.by_name[name]
        gram = sums.matrix(name)
        stored = parameter(self.task.graph, self.adjustment, name).detach()
        weight = stored.float()
        qparams = layer_qparams(name, spec, weight, shared_step)
        change = nearest(weight, spec, qparams).sub_(weight)
        error = output_error(gram, weight_matrix(layer, change))
        error_rtn = error
        if not bool((factors == 1).all()):
            original = rescale_weight(node, weight, inputs=1 / factors)
            original_qparams = layer_qparams(name, spec, original)
            change = nearest(original, spec, original_qparams).sub_(original)
            change = rescale_weight(node, change, inputs=factors)
            error_rtn = output_error(gram, weight_matrix(layer, change))
        # Layers that share one scale would need one share of the range
        has_own_scale = shared_step is None or spec.qscheme != "per_tensor"
        if self.settings.clip_search and has_own_scale:
            # First with room for inputs that were always zero; without if that costs too much
            for search_gram in (sums.alive(name), gram):
                shares = clip_shares(spec)
                search = ClipSearch(
                    layer, spec, weight, search_gram, shares=shares, shared_step=shared_step
                )
                clipped = search.qparams
                change = nearest(weight, spec, clipped).sub_(weight)
                clipped_error = output_error(gram, weight_matrix(layer, change))
                if clipped_error < error:
                    qparams, error = clipped, clipped_error
                if error <= error_rtn:
                    break
        energy = output_error(gram, weight_matrix(layer, weight)) or 1.0
        quantized = nearest(stored, spec, qparams)
        rounded = RoundedWeight(quantized, qparams, error_rtn / energy, error / energy)
        return rounded.stored_like(stored)

    def _remark(self, names: Sequence[str], text: str) -> None:
        remarks = [Remark(name, text) for name in names]
        self.adjustment = self.adjustment.with_remarks(*remarks)


@dataclass(frozen=True)
class _SampledRows:
    """Holds rows of the weights of layers like `layer`. Each stands for `share` rows."""

    node: Node
    layer: nn.Module
    spec: QuantizationSpec
    weight: Tensor
    share: float

    @property
    def is_exact(self) -> bool:
        """Check whether the errors of single scales add up to the error of the outputs."""
        return has_row_scales(self.layer, self.spec)

    def loss(self, sums: GroupSums, factors: Tensor, *, clip: bool) -> float:
        """Return |Q(W diag(s)) diag(s)^-1 X - W X|^2, the paper's equation 4."""
        scaled = rescale_weight(self.node, self.weight, inputs=factors)
        gram = sums.divided(self.node.name, factors)
        shares = few_clip_shares(self.spec) if clip else (1.0,)
        search = ClipSearch(self.layer, self.spec, scaled, gram, shares=shares)
        if self.is_exact:
            # Without products between groups, which are negative as often as positive
            return self.share * float(search.errors.sum())
        change = nearest(scaled, self.spec, search.qparams).sub_(scaled)
        return self.share * output_error(gram, weight_matrix(self.layer, change))


def _factors(s_x: Tensor, alpha: float, channels: int) -> Tensor:
    """Return s_X^alpha / sqrt(max * min), for each `channels` of them; 1 for channels that were
    always zero.
    """
    rows = s_x.view(-1, channels)
    live = rows > 0
    factors = (rows**alpha).clamp_min(_MIN_FACTOR)
    largest = torch.where(live, factors, 0.0).amax(1, keepdim=True)
    smallest = torch.where(live, factors, torch.inf).amin(1, keepdim=True)
    return torch.where(live, factors / (largest * smallest).sqrt(), 1.0).flatten()


def least_step(loss: Callable[[int], float], steps: int) -> int:
    """Return the step from 0 to `steps` with the least loss: try every fourth first, then those
    next to the best so far.

    Step 0 is always tried. The first of equal steps wins.

    >>> least_step(lambda step: abs(step - 7), 20)
    7
    """
    losses: dict[int, float] = {}
    stride = max(1, steps // 5)
    near = list(range(0, steps + 1, stride))
    while True:
        for step in near:
            if step not in losses and 0 <= step <= steps:
                losses[step] = loss(step)
        best = min(losses, key=lambda step: (losses[step], step))
        if stride == 1 or not math.isfinite(losses[best]):
            return best
        stride = (stride + 1) // 2 if stride > 2 else 1
        near = [best - stride, best + stride]
