"""AWQ: input channels with large values get finer steps, and ranges of weights are cut where that pays.

Errors of outputs are computed from the Gram matrix of the inputs, so each group's inputs are looked at once. Its
diagonal is also the measure of a channel: the root mean square, where the paper has the mean magnitude.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.adjustment import Adjustment, Remark, Rounded, Task, adjusted
from quantizer.algorithms.column_scales import group_size
from quantizer.algorithms.fold import admissible, factored_apart, folded, parameter, shared_folds
from quantizer.algorithms.gram import DEEPEST, UNREACHED, GroupSums, deepest, quantized_layers, zero_channels
from quantizer.algorithms.patches import matrix_weight, weight_matrix
from quantizer.algorithms.round_to_nearest import layer_qparams, nearest, nearest_qparams, output_error, sampled_rows
from quantizer.algorithms.sequential_runner import SequentialRunner, watching
from quantizer.config.algorithms import AWQConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import rescaled
from quantizer.graph.structure import InputGroup
from quantizer.nn.network import Network
from quantizer.numerics.granularity import scale_shape, to_rows
from quantizer.numerics.qparams import POWERS_OF_TWO, SMALLEST_SCALE, QParams, uncut
from quantizer.numerics.two_level import beside
from quantizer.observers import code_range_of

LEAST_FACTOR = 1e-4
SHRUNK = tuple(1 - step / 20 for step in range(11))
"""Candidates for a range, as shares of the full one (Lin et al. 2023, "AWQ", and its authors' code)."""
SHRUNK_POWERS = (1.0, 0.5)
"""The same where scales are powers of two."""
COARSE = (1.0, 0.85, 0.7, 0.55)
"""Fewer candidates, to estimate what a weight would lose once it is clipped."""
TOO_DEEP = f"it sums over more than {DEEPEST} inputs, too many for their Gram matrix; it stays at round-to-nearest"


def awq(task: Task, settings: AWQConfig, found: Adjustment) -> Adjustment:
    """Rescale the input channels of each group, and find the scales of its weights.

    Weights are rounded to nearest at these scales; an algorithm that rounds takes over `qparams`. Its inputs are those
    of the network that it is given when it begins, whatever is folded since.

    Raises:
        DataError: a value in the network, or a weight, is not finite; it is named.
    """
    return _Search(task, settings, found).run()


class _Search:
    """Goes through the groups in order; a group is done once no later one changes its weights."""

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
        self.runner = SequentialRunner(network, task.batches(), ActivationStore(task.memory), task.ranks)

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
            for ready in [at for at, those in waiting.items() if later.isdisjoint(those.layers)]:
                self._round(waiting.pop(ready), factors.get(self.leads.get(ready, ready), factors[ready]))
            is_shared = any(first <= number < other for other, first in self.leads.items())
            if not waiting and not is_shared:
                self.task.after_group(self.found, number + 1)
        return self.found

    def _gather(self, group: InputGroup, layers: Sequence[str]) -> GroupSums | None:
        """Run up to the value that the group reads, and sum up its products; None if there is nothing to go by."""
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
        size = sums.channel_size(group.channels, by_expert=factored_apart(self.task.graph, group))
        dead = (size.view(-1, group.channels) == 0).sum(1).tolist()
        if count := sum(each for each in dead if len(dead) == 1 or each < group.channels):  # not experts without tokens
            self._remark(sums.layers, zero_channels(count))
        ones = torch.ones_like(size)
        if group.tied or group.is_fixed or not self.settings.scale_search:
            return ones

        def factors(step: int) -> Tensor:
            return admissible(
                self.task.graph, group, _factors(size, step / self.settings.grid, group.channels), self.found
            )

        def loss(step: int) -> float:
            found = self._loss(sums, factors(step), clip=self.settings.clip_search)
            if step == 0 and self.settings.clip_search:  # where scales lie across rows, clipping may do harm
                found = min(found, self._loss(sums, ones, clip=False))
            return found

        found = factors(least_step(loss, self.settings.grid))
        if not torch.equal(found, ones):
            self.found = folded(self.task.graph, group, found, self.found)
        return found

    def _loss(self, sums: GroupSums, factors: Tensor, *, clip: bool) -> float:
        """Squared error of the group's outputs if the weights' columns are multiplied with these factors."""
        graph, total = self.task.graph, 0.0
        rows = sum(len(parameter(graph, self.found, name)) for name in sums.layers)
        for name in sums.layers:
            node, spec = graph.by_name[name], self.task.specs[name, "weights"]
            weight, share = sampled_rows(parameter(graph, self.found, name), spec, node, rows)
            scaled, layer = rescaled(node, weight.float(), inputs=factors), self.runner.network.layers[name]
            if clip:
                qparams = clipped_qparams(layer, spec, scaled, sums.divided(name, factors), COARSE)
            else:
                qparams = layer_qparams(name, spec, scaled)
            total += share * self._error(sums, name, scaled, qparams, 1 / factors)
        return total

    def _error(self, sums: GroupSums, name: str, weight: Tensor, qparams: QParams, back: Tensor | None = None) -> float:
        """Squared error of a layer's outputs if this weight is rounded, and its columns then multiplied by `back`."""
        lost = nearest(weight, self.task.specs[name, "weights"], qparams).sub_(weight)
        if back is not None:
            lost = rescaled(self.task.graph.by_name[name], lost, inputs=back)
        return output_error(sums.matrix(name), weight_matrix(self.runner.network.layers[name], lost))

    def _round(self, sums: GroupSums, factors: Tensor) -> None:
        """Scales and rounded weights of a group's layers."""
        sums.divide(factors)
        for name in sums.layers:
            rounded = self._rounded(name, sums, factors)
            if rounded.after > rounded.before:
                ratio = rounded.after / max(rounded.before, 1e-30)
                text = f"its error is {ratio:.2f} times that of round-to-nearest; other layers gain more"
                self.found = self.found.with_remarks(Remark(name, text, is_warning=False))
            qparams = {**self.found.qparams, name: rounded.qparams}
            self.found = replace(self.found.with_rounded({name: rounded}), qparams=qparams)

    def _rounded(self, name: str, sums: GroupSums, factors: Tensor) -> Rounded:
        spec, layer = self.task.specs[name, "weights"], self.runner.network.layers[name]
        stored = parameter(self.task.graph, self.found, name).detach()
        weight = stored.float()
        qparams = layer_qparams(name, spec, weight)
        plain = error = self._error(sums, name, weight, qparams)
        if self.settings.clip_search:
            clipped = clipped_qparams(layer, spec, weight, sums.alive(name))
            if (cut := self._error(sums, name, weight, clipped)) < error:
                qparams, error = clipped, cut
        if not bool((factors == 1).all()):  # what round-to-nearest would lose without the factors
            before = rescaled(self.task.graph.by_name[name], weight, inputs=1 / factors)
            plain = self._error(sums, name, before, layer_qparams(name, spec, before), factors)
        energy = output_error(sums.matrix(name), weight_matrix(layer, weight)) or 1.0
        return Rounded(nearest(stored, spec, qparams), qparams, plain / energy, error / energy).beside(stored)

    def _remark(self, names: Sequence[str], text: str) -> None:
        self.found = self.found.with_remarks(*(Remark(name, text) for name in names))


def _factors(size: Tensor, ratio: float, channels: int) -> Tensor:
    """size^ratio, around 1 for each `channels` of them; 1 for channels that were always zero."""
    rows = size.view(-1, channels)
    factors, live = (rows**ratio).clamp_min(LEAST_FACTOR), rows > 0
    most = torch.where(live, factors, 0.0).amax(1, keepdim=True)
    least = torch.where(live, factors, torch.inf).amin(1, keepdim=True)
    return torch.where(live, factors / (most * least).sqrt(), 1.0).flatten()


def least_step(loss: Callable[[int], float], steps: int) -> int:
    """The step from 0 to `steps` with the least loss: every fourth first, then those next to the best so far.

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


def clipped_qparams(
    layer: nn.Module, spec: QuantizationSpec, weight: Tensor, gram: Tensor, shares: Sequence[float] = SHRUNK
) -> QParams:
    """Scale and zero point of each row or group, shrunk so that the error of the layer's outputs is least.

    Where the rule of the spec cuts something off, the scale that does not is tried as well.

    The error of a group of columns is that of its own inputs, without those of other groups, so that each scale is
    chosen by itself. The zero point of a range that shrinks at both ends stays.

    Args:
        layer: for its kind and sizes.
        weight: as the layer stores it, float32.
        gram: of the layer's inputs, [groups, depth, depth].
        shares: of the full range, the candidates where scales are not powers of two.
    """
    full = nearest_qparams(spec, weight)
    best = torch.full_like(full.scale, float("inf"))
    scale = full.scale
    powers = spec.scale_type in POWERS_OF_TWO
    for share in SHRUNK_POWERS if powers else dict.fromkeys((*shares, uncut(code_range_of(spec)))):
        smaller = (full.scale * share).clamp_min(SMALLEST_SCALE)
        tried = QParams(beside(smaller, full.scale, spec.scale_type), full.zero_point)
        error = scale_errors(layer, spec, nearest(weight, spec, tried).sub_(weight), gram).to(best)
        if spec.scales_per_group > 1:  # they share an exponent, so that they shrink together
            blocks = error.reshape(-1, spec.scales_per_group)
            error = blocks.sum(1, keepdim=True).expand_as(blocks).reshape(error.shape)
        scale = torch.where(error < best, tried.scale, scale)
        best = torch.minimum(best, error)
    return QParams(scale, full.zero_point)


def scale_errors(layer: nn.Module, spec: QuantizationSpec, difference: Tensor, gram: Tensor) -> Tensor:
    """The squared error of outputs that the weights of each scale make by themselves, of `scale_shape`.

    Exact for scales of rows, of parts of rows, and of a whole tensor; for scales that lie across rows, inputs count as
    uncorrelated.
    """
    matrix = weight_matrix(layer, difference)
    whole_groups = spec.qscheme == "per_group" and spec.scales_per_group == 1
    if whole_groups and difference.dim() == 2 and spec.ch_axis in (1, -1):
        size = group_size(spec, matrix.shape[2])
        if short := -matrix.shape[2] % size:
            matrix, gram = nn.functional.pad(matrix, (0, short)), nn.functional.pad(gram, (0, short, 0, short))
        groups, rows, count = *matrix.shape[:2], matrix.shape[2] // size
        runs = matrix.view(groups, rows, count, size).transpose(1, 2)
        within = gram.view(groups, count, size, count, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        return (runs @ within).mul_(runs).sum(3).transpose(1, 2).reshape(groups * rows, count)
    shape = scale_shape(tuple(difference.shape), *spec.cut)
    channels = 1 if getattr(layer, "transposed", False) else 0
    if spec.qscheme == "per_channel" and spec.ch_axis == channels and len(matrix) * matrix.shape[1] == shape[0]:
        return (matrix @ gram).mul_(matrix).sum(2).flatten()
    if spec.qscheme == "per_tensor":
        errors = (matrix @ gram).mul_(matrix)
        return errors.sum((1, 2)).view(shape) if shape else errors.sum()
    alone = matrix_weight(layer, matrix.square() * gram.diagonal(dim1=1, dim2=2)[:, None])
    return to_rows(alone, *spec.cut).sum(1).view(shape)
