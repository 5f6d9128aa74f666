"""AWQ: input channels with large values get finer steps, and ranges of weights are cut where
that pays.

Errors of outputs are computed from the Gram matrix of the inputs, so each group's inputs are
looked at once. Its diagonal is also the measure of a channel: the root mean square, where the
paper has the mean magnitude.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.adjustment import Adjustment, Remark, Rounded, Task, adjusted
from quantizer.algorithms.clip_search import ClipSearch, candidates, few_candidates, is_by_row
from quantizer.algorithms.fold import (
    admissible,
    factored_apart,
    folded,
    parameter,
    shared_folds,
)
from quantizer.algorithms.gram import (
    DEEPEST,
    UNREACHED,
    GroupSums,
    deepest,
    quantized_layers,
    zero_channels,
)
from quantizer.algorithms.output_error import output_error
from quantizer.algorithms.patches import weight_matrix
from quantizer.algorithms.round_to_nearest import layer_qparams, nearest, sampled_rows
from quantizer.algorithms.sequential_runner import SequentialRunner, watching
from quantizer.config.algorithms import AWQConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import rescaled
from quantizer.graph.ir import Node
from quantizer.graph.structure import InputGroup
from quantizer.nn.network import Network
from quantizer.numerics.qparams import QParams

LEAST_FACTOR = 1e-4
TOO_DEEP = (
    f"it sums over more than {DEEPEST} inputs, too many for their Gram matrix; it stays at "
    "round-to-nearest"
)


def awq(task: Task, settings: AWQConfig, found: Adjustment) -> Adjustment:
    """Rescale the input channels of each group, and find the scales of its weights.

    Weights are rounded to nearest at these scales; an algorithm that rounds takes over
    `qparams`. Its inputs are those of the network that it is given when it begins, whatever is
    folded since.

    Raises:
        DataError: a value in the network, or a weight, is not finite; it is named.
    """
    return _Search(task, settings, found).run()


class _Search:
    """Goes through the groups in order; a group is done once no later one changes its
    weights.
    """

    def __init__(self, task: Task, settings: AWQConfig, found: Adjustment) -> None:
        self.task, self.settings, self.found = task, settings, found
        self.before = task.before if task.done else found
        own = partial(quantized_layers, task)
        self.groups, self.leads = shared_folds(
            task.graph, task.structure.groups, lambda row: bool(own(row)), self.before
        )
        self.own = [own(group) for group in self.groups]
        for name in (name for names in self.own for name in names):
            layer_qparams(name, task.specs[name, "weights"], parameter(task.graph, found, name))
        network = Network(adjusted(task.graph, self.before))
        self.runner = SequentialRunner(
            network, task.batches(), ActivationStore(task.memory), task.ranks, together=True
        )

    def run(self) -> Adjustment:
        """All groups, but those that an interrupted run had done."""
        waiting, factors = dict[int, GroupSums](), dict[int, Tensor]()
        for number, (group, layers) in enumerate(zip(self.groups, self.own, strict=True)):
            if number < self.task.done:
                continue
            sums = self._gather(group, layers)
            if sums is not None:
                waiting[number], factors[number] = sums, self._rescale(group, sums)
            after = [row.fold for row in self.groups[number + 1 :] if row.fold is not None]
            later = {layer for fold in after for layer in (fold.node, *fold.extra)}
            for ready in [
                at for at, those in waiting.items() if later.isdisjoint(those.layers)
            ]:
                self._round(
                    waiting.pop(ready),
                    factors.get(self.leads.get(ready, ready), factors[ready]),
                )
            is_shared = any(first <= number < other for other, first in self.leads.items())
            if not waiting and not is_shared:
                self.task.after_group(self.found, number + 1)
        return self.found

    def _gather(self, group: InputGroup, layers: Sequence[str]) -> GroupSums | None:
        """Run up to the value that the group reads, and sum up its products; None if there is
        nothing to go by.
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
        """Find the group's factors, and fold them."""
        size = sums.channel_size(
            group.channels, by_expert=factored_apart(self.task.graph, group)
        )
        dead = (size.view(-1, group.channels) == 0).sum(1).tolist()
        # Not experts without tokens
        if count := sum(each for each in dead if len(dead) == 1 or each < group.channels):
            self._remark(sums.layers, zero_channels(count))
        ones = torch.ones_like(size)
        if group.tied or group.is_fixed or not self.settings.scale_search:
            return ones

        samples, foldable = self._samples(sums), admissible(self.task.graph, group, self.found)

        def factors(step: int) -> Tensor:
            return foldable(_factors(size, step / self.settings.grid, group.channels))

        def loss(step: int) -> float:
            clip, tried = self.settings.clip_search, factors(step)
            found = sum(sample.loss(sums, tried, clip=clip) for sample in samples)
            # So that clipping may do harm
            if step == 0 and clip and not all(sample.is_exact for sample in samples):
                found = min(
                    found, sum(sample.loss(sums, ones, clip=False) for sample in samples)
                )
            return found

        found = factors(least_step(loss, self.settings.grid))
        if not torch.equal(found, ones):
            self.found = folded(self.task.graph, group, found, self.found)
        return found

    def _samples(self, sums: GroupSums) -> list[_Sample]:
        """Rows of the weights of the group's layers, of layers that are alike together: calls
        cost more than rows.
        """
        graph, alike = self.task.graph, dict[Any, list[str]]()
        weights = {name: parameter(graph, self.found, name) for name in sums.layers}
        for name in sums.layers:
            spec = self.task.specs[name, "weights"]
            alone = spec.scale_type == "e4m3" or not is_by_row(
                self.runner.network.layers[name], spec
            )
            alike.setdefault(name if alone else spec, []).append(name)
        total, found = sum(map(len, weights.values())), []
        for names in alike.values():
            node, spec = graph.by_name[names[0]], self.task.specs[names[0], "weights"]
            parts = [
                sampled_rows(weights[name], spec, node, total)[0].float() for name in names
            ]
            weight, all_rows = torch.cat(parts), sum(len(weights[name]) for name in names)
            found.append(
                _Sample(
                    node,
                    self.runner.network.layers[names[0]],
                    spec,
                    weight,
                    all_rows / len(weight),
                )
            )
        return found

    def _error(
        self,
        sums: GroupSums,
        name: str,
        weight: Tensor,
        qparams: QParams,
        back: Tensor | None = None,
    ) -> float:
        """Squared error of a layer's outputs if this weight is rounded, and its columns then
        multiplied by `back`.
        """
        lost = nearest(weight, self.task.specs[name, "weights"], qparams).sub_(weight)
        if back is not None:
            lost = rescaled(self.task.graph.by_name[name], lost, inputs=back)
        return output_error(
            sums.matrix(name), weight_matrix(self.runner.network.layers[name], lost)
        )

    def _round(self, sums: GroupSums, factors: Tensor) -> None:
        """Scales and rounded weights of a group's layers."""
        sums.divide(factors)
        for name in sums.layers:
            rounded = self._rounded(name, sums, factors)
            if rounded.after > rounded.before:
                ratio = rounded.after / max(rounded.before, 1e-30)
                text = f"its error is {ratio:.2f} times that of round-to-nearest"
                if len(sums.layers) > 1:
                    text += "; other layers gain more"
                self.found = self.found.with_remarks(Remark(name, text, is_warning=False))
            qparams = {**self.found.qparams, name: rounded.qparams}
            self.found = replace(self.found.with_rounded({name: rounded}), qparams=qparams)

    def _rounded(self, name: str, sums: GroupSums, factors: Tensor) -> Rounded:
        spec, layer = self.task.specs[name, "weights"], self.runner.network.layers[name]
        stored = parameter(self.task.graph, self.found, name).detach()
        weight = stored.float()
        qparams = layer_qparams(name, spec, weight)
        plain = error = self._error(sums, name, weight, qparams)
        # What round-to-nearest would lose without the factors
        if not bool((factors == 1).all()):
            before = rescaled(self.task.graph.by_name[name], weight, inputs=1 / factors)
            plain = self._error(sums, name, before, layer_qparams(name, spec, before), factors)
        if self.settings.clip_search:
            for gram in (sums.alive(name), sums.matrix(name)):
                clipped = ClipSearch(layer, spec, weight, gram, candidates(spec)).qparams
                if (cut := self._error(sums, name, weight, clipped)) < error:
                    qparams, error = clipped, cut
                # Else a range that leaves room for inputs that were always zero costs too much
                if error <= plain:
                    break
        energy = output_error(sums.matrix(name), weight_matrix(layer, weight)) or 1.0
        return Rounded(
            nearest(stored, spec, qparams), qparams, plain / energy, error / energy
        ).beside(stored)

    def _remark(self, names: Sequence[str], text: str) -> None:
        self.found = self.found.with_remarks(*(Remark(name, text) for name in names))


@dataclass(frozen=True)
class _Sample:
    """Rows of the weights of layers like `layer`, each of which stands for `share` of them."""

    node: Node
    layer: nn.Module
    spec: QuantizationSpec
    weight: Tensor
    share: float

    @property
    def is_exact(self) -> bool:
        """Whether the errors of scales, each by itself, tell the error of the outputs."""
        return is_by_row(self.layer, self.spec)

    def loss(self, sums: GroupSums, factors: Tensor, *, clip: bool) -> float:
        """Squared error of the outputs if the columns are multiplied with these factors."""
        scaled, gram = (
            rescaled(self.node, self.weight, inputs=factors),
            sums.divided(self.node.name, factors),
        )
        found = ClipSearch(
            self.layer, self.spec, scaled, gram, few_candidates(self.spec) if clip else (1.0,)
        )
        if self.is_exact:  # what groups of columns have in common is as often less as more
            return self.share * float(found.errors.sum())
        lost = nearest(scaled, self.spec, found.qparams).sub_(scaled)
        return self.share * output_error(gram, weight_matrix(self.layer, lost))


def _factors(size: Tensor, ratio: float, channels: int) -> Tensor:
    """size^ratio, around 1 for each `channels` of them; 1 for channels that were always
    zero.
    """
    rows = size.view(-1, channels)
    factors, live = (rows**ratio).clamp_min(LEAST_FACTOR), rows > 0
    most = torch.where(live, factors, 0.0).amax(1, keepdim=True)
    least = torch.where(live, factors, torch.inf).amin(1, keepdim=True)
    return torch.where(live, factors / (most * least).sqrt(), 1.0).flatten()


def least_step(loss: Callable[[int], float], steps: int) -> int:
    """The step from 0 to `steps` with the least loss: every fourth first, then those next to
    the best so far.

    Step 0 is always among them, and the first of equals is taken.

    >>> least_step(lambda step: abs(step - 7), 20)
    7
    """
    tried: dict[int, float] = {}
    stride = max(1, steps // 5)
    near = list(range(0, steps + 1, stride))
    while True:
        tried |= {step: loss(step) for step in near if step not in tried and 0 <= step <= steps}
        best = min(tried, key=lambda step: (tried[step], step))
        if stride == 1 or not math.isfinite(tried[best]):
            return best
        stride = (stride + 1) // 2 if stride > 2 else 1
        near = [best - stride, best + stride]
