"""Compares a float and a quantized network on the same batches, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.algorithms.sequential_runner import no_batches
from quantizer.comparison.noise import Noise, beside_far_values
from quantizer.comparison.output_comparison import ComparedNetworks, require_same_shape
from quantizer.comparison.output_figures import (
    POOLED_FIGURE,
    ROWS_KEPT,
    OutputFigures,
    leaves,
    lowest_cosine,
    named_metrics,
    pooled_noise,
    worst,
)
from quantizer.comparison.perplexity import TokenLoss, next_tokens
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.distributed import ALONE, Ranks, merge_in_batch_order
from quantizer.graph.output_parts import Output
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import energy
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded

_BATCHES_BETWEEN_EXCHANGES = 16
"""After so many batches of each rank, the ranks exchange their results."""


@dataclass
class LayerNoise:
    """The noise of one quantized tensor.

    Values far outside the range of the others, such as the large negative ones of a mask, are
    left out. The output of a function that saturates has none, so all its values count.

    Attributes:
        layer: the layer's name.
        role: of the tensor in the layer.
        local: the noise when only this tensor is quantized.
        accumulated: the noise when the whole network is quantized; None for weights and biases.
        is_bounded: whether the tensor is the output of a function that saturates.
    """

    layer: str
    role: str
    local: Noise = field(default_factory=Noise)
    accumulated: Noise | None = None
    is_bounded: bool = False

    def add(
        self,
        x: Tensor,
        local: Tensor,
        accumulated: Tensor | None = None,
    ) -> None:
        """Add one batch of float values and their two quantized versions."""
        others = None if self.is_bounded else beside_far_values(x)
        if others is not None:
            x = x[others]
            local = local[others]
            if accumulated is not None:
                accumulated = accumulated[others]
        if self.accumulated is None or accumulated is None:
            self.local.add(x, local)
            return
        signal = energy(x)
        self.accumulated.add(x, accumulated, signal)
        # The cosine is that of the whole network, so the energy of `local` is not needed
        self.local.signal += signal
        self.local.error += energy(x - local)

    @property
    def cosine(self) -> float:
        """Return the cosine when the whole network is quantized; that of weights and biases
        alone.
        """
        return self.local.cosine if self.accumulated is None else self.accumulated.cosine

    def merge(self, other: LayerNoise) -> None:
        """Add other batches of the same tensor."""
        self.local.merge(other.local)
        if self.accumulated is not None and other.accumulated is not None:
            self.accumulated.merge(other.accumulated)


@dataclass
class Score:
    """How well one network predicts its targets: classes, or the next tokens of a text."""

    labelled: int = 0
    correct: int = 0
    loss: TokenLoss = field(default_factory=TokenLoss)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add one batch. An output that does not fit its targets is ignored."""
        target = batch.target
        if target is not None and output.dim() == 2 and target.shape == output.shape[:1]:
            hits = output.argmax(1) == target.to(output.device)
            self.labelled += len(target)
            self.correct += int(hits.sum())
        following = next_tokens(batch) if output.dim() == 3 else None
        if following is not None and following.shape == output.shape[:2]:
            self.loss.add(output, following)

    def merge(self, other: Score) -> None:
        """Add other batches."""
        self.labelled += other.labelled
        self.correct += other.correct
        self.loss.nll += other.loss.nll
        self.loss.tokens += other.loss.tokens

    def metrics(self) -> dict[str, float]:
        """Return top-1 accuracy on labelled samples, perplexity on text."""
        metrics: dict[str, float] = {}
        if self.labelled:
            metrics["top1"] = self.correct / self.labelled
        if self.loss.tokens:
            metrics["perplexity"] = self.loss.perplexity
        return metrics


@dataclass
class NetworkComparison:
    """The result of running a float and a quantized network on the same batches.

    Attributes:
        layers: the noise of each quantized tensor.
        outputs: the figures of each output and of its parts.
        quantization: empty if passes keep the float function. Otherwise `outputs` has the
            comparison with the user's model, and `quantization` that with the float network
            after passes.
        spoiled: the first batch where only the quantized network outputs NaN or infinity.
        batches: how many batches were compared.
        samples: how many samples have an output with classes.
        agreeing: for how many samples both networks rank the same class first.
        rankable: whether the first floating-point output has classes in all batches.
        float_score: how well the float network predicts the targets.
        quantized_score: how well the quantized network does.
    """

    layers: list[LayerNoise]
    outputs: list[OutputFigures] = field(default_factory=list)
    quantization: list[OutputFigures] = field(default_factory=list)
    spoiled: int | None = None
    batches: int = 0
    samples: int = 0
    agreeing: int = 0
    rankable: bool = True
    float_score: Score = field(default_factory=Score)
    quantized_score: Score = field(default_factory=Score)

    def merge(self, other: NetworkComparison) -> None:
        """Add the batches of another one, in which the same tensors were compared."""
        for noise, other_noise in zip(self.layers, other.layers, strict=True):
            noise.merge(other_noise)
        _merge_figures(self.outputs, other.outputs)
        _merge_figures(self.quantization, other.quantization)
        if self.spoiled is None and other.spoiled is not None:
            self.spoiled = self.batches + other.spoiled
        self.batches += other.batches
        self.samples += other.samples
        self.agreeing += other.agreeing
        self.rankable &= other.rankable
        self.float_score.merge(other.float_score)
        self.quantized_score.merge(other.quantized_score)

    def metrics(self) -> dict[str, float]:
        """Return the figures that gates and reports use.

        SQNR and cosine are the lowest of all floating-point outputs and parts. Integer outputs
        have the lowest share of equal values instead, and so have constants if no output has an
        SQNR.
        """
        metrics: dict[str, float] = {}
        kinds = ["integer"]
        lowest = worst(self.outputs)
        cosine = lowest_cosine(self.outputs)
        if lowest is None:
            kinds.append("constant")
        elif lowest.sqnr_db is not None and cosine is not None:
            metrics["sqnr_db"] = lowest.sqnr_db
            metrics["cosine"] = cosine
            metrics[POOLED_FIGURE] = self.output.sqnr_db
        equal_shares: list[float] = []
        order_shares: list[float] = []
        for output in self.outputs:
            share = output.whole.equal_share
            if share is not None and output.whole.kind in kinds:
                equal_shares.append(share)
            if output.order is not None and output.order.rows:
                order_shares.append(output.order.share)
        if equal_shares:
            metrics["equal_outputs"] = min(equal_shares)
        if order_shares:
            metrics[ROWS_KEPT] = min(order_shares)
        if self.rankable and self.samples:
            metrics["top1_agreement"] = self.agreeing / self.samples
        return metrics

    def named_metrics(self) -> dict[str, float]:
        """Return the figures of each output and part, by names such as `sqnr_db[0.boxes]`."""
        return named_metrics(self.outputs)

    @property
    def losses(self) -> list[OutputFigures]:
        """Return the figures of the loss by quantization alone, without that of passes."""
        return self.quantization or self.outputs

    @property
    def output(self) -> Noise:
        """Return the noise of all floating-point outputs together."""
        return pooled_noise(self.outputs)

    @property
    def first_spoiled(self) -> str | None:
        """Return the first layer whose values are NaN or infinity after quantization; None if
        no quantized tensor shows it.
        """
        for row in self.layers:
            if row.accumulated is not None and not math.isfinite(row.accumulated.error):
                return row.layer
        return None

    def pairs(self) -> dict[str, dict[str, float]]:
        """Return top-1 accuracy or perplexity of both networks, if the data has targets."""
        before = self.float_score.metrics()
        after = self.quantized_score.metrics()
        pairs = {}
        for name, value in before.items():
            pairs[name] = {"float": value, "quantized": after[name]}
        return pairs


def _merge_figures(figures: Sequence[OutputFigures], others: Sequence[OutputFigures]) -> None:
    for output, other in zip(figures, others, strict=True):
        output.merge(other)


def target_metrics(
    model: Callable[..., Any],
    batches: Iterable[Batch],
) -> dict[str, float]:
    """Return top-1 accuracy of one model on labelled batches, or perplexity on text; nothing if
    the data has no targets.
    """
    score = Score()
    for batch in batches:
        outputs = pytree.tree_leaves(model(*batch.args, **batch.kwargs))
        if isinstance(outputs[0], Tensor):
            score.add(outputs[0], batch)
    return score.metrics()


def over_batches(
    batches: Iterable[Batch],
    run: Callable[[Batch], None],
    ranks: Ranks = ALONE,
    exchange: Callable[[int], None] = lambda count: None,
) -> None:
    """Call `run` with each batch of this rank's share, without gradients.

    Args:
        batches: of all ranks.
        run: called with one batch.
        ranks: who share the batches.
        exchange: called by all ranks together, every few batches and at the end, with the
            number of batches so far.

    Raises:
        DataError: there is no batch, or `run` raised it. Then the message names the batch.
    """
    count = 0
    with torch.no_grad():
        for count, batch in enumerate(batches, 1):
            if ranks.owns(count - 1):
                with prefix_batch_errors(count - 1):
                    run(batch)
            if count % (_BATCHES_BETWEEN_EXCHANGES * ranks.world_size) == 0:
                exchange(count)
    if not count:
        raise no_batches("evaluation")
    exchange(count)


def compare(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    ranks: Ranks = ALONE,
    *,
    user: Network | None = None,
    outputs: Sequence[Output] | None = None,
) -> NetworkComparison:
    """Run both networks once on each batch, each rank on its share.

    Results are added up in the order of the batches, so they do not depend on the number of
    ranks.

    Args:
        reference: the float network, with the nodes of the quantized one.
        quantized: the network that is compared with it.
        batches: of data, on the networks' device.
        ranks: who share the batches.
        user: the user's model, for the outputs, if `reference` computes another function.
        outputs: the outputs that are compared; those of the graph if None.

    Raises:
        DataError: there is no batch, or an output of the float network is not finite.
        ModelError: a tensor has different shapes in the two networks.
        RankError: the ranks do not have the same batches.
    """
    no_noise, taps = _taps(quantized)
    compared = ComparedNetworks(reference, user, outputs)
    results: list[NetworkComparison] = []

    def empty() -> NetworkComparison:
        return NetworkComparison(deepcopy(no_noise), *compared.empty())

    def run(batch: Batch) -> None:
        # Both networks run in step, so that each pair of values is compared while it exists
        result = empty()
        float_run = reference.start(batch.args, batch.kwargs)
        quantized_run = quantized.start(batch.args, batch.kwargs)
        recorders = compared.recorders()
        steps = zip(float_run.steps(), quantized_run.steps(), strict=True)
        for (name, x), (_, y) in steps:
            recorders[0].see(name, x)
            recorders[1].see(name, y)
            for quantizer, index in taps.get(name, ()):
                require_same_shape(name, x, y)
                noise = result.layers[index]
                # The quantized network has not applied a quantizer of a layer's input yet
                is_output = noise.layer == name
                accumulated = y if is_output else quantizer.quantized_copy(y)
                noise.add(x, quantizer.quantized_copy(x), accumulated)
        expected, result.outputs, result.quantization = compared.figures(
            (float_run, quantized_run), recorders, batch
        )
        _record_predictions(result, batch, expected, quantized_run.outputs())
        results.append(result)

    total = empty()

    def exchange(count: int) -> None:
        gathered = ranks.gather(results, f"the comparison of {count} batches")
        for result in merge_in_batch_order(gathered):
            total.merge(result)
        results.clear()

    over_batches(batches, run, ranks, exchange)
    parameters = _parameter_noise(reference, quantized)
    return replace(total, layers=parameters + total.layers)


_Taps = dict[str, list[tuple[TensorQuantizer, int]]]
"""For each node whose value is quantized, its quantizers, each with the index of its
`LayerNoise` in a list.
"""


def _taps(quantized: Network) -> tuple[list[LayerNoise], _Taps]:
    """Return an empty `LayerNoise` for each activation that a network quantizes, and the nodes
    that have the values.
    """
    rows: list[LayerNoise] = []
    taps: _Taps = {}
    for name, role, quantizer in quantized.quantizers():
        if is_parameter(role):
            continue
        node = quantized.graph.by_name[name]
        source = name
        if role != "activation" and node.op != "input":
            # The input of a layer is the value of another node
            source = node.input_roles()[role]
        tap = (quantizer, len(rows))
        taps.setdefault(source, []).append(tap)
        is_bounded = node.row.kind == "nonlinear"
        row = LayerNoise(name, role, accumulated=Noise(), is_bounded=is_bounded)
        rows.append(row)
    return rows, taps


def _parameter_noise(reference: Network, quantized: Network) -> list[LayerNoise]:
    """Return the noise of weights and biases, which needs no data.

    A bias is compared with its own rounding, because bias correction changes it on purpose.
    """
    rows = []
    for name, role, quantizer in quantized.quantizers():
        if not is_parameter(role):
            continue
        key = parameter_name(role)
        exact = loaded(reference.layers[name].get_parameter(key))
        if base_role(role) == "bias":
            rounded = quantizer.quantized_copy(exact)
        else:
            rounded = loaded(quantized.layers[name].get_parameter(key))
        row = LayerNoise(name, role)
        row.add(exact, rounded)
        rows.append(row)
    return rows


def _record_predictions(
    result: NetworkComparison,
    batch: Batch,
    reference: Sequence[Tensor],
    quantized: Sequence[Tensor],
) -> None:
    """Record three things about one batch: whether the quantized outputs are finite, whether
    both networks rank the same class first, and how well they predict the targets.

    Classes and predictions are those of the first floating-point output.
    """
    result.batches = 1
    for part in leaves(result.outputs):
        if part.is_float and not math.isfinite(part.noise.error):
            result.spoiled = 0
    pairs = list(zip(reference, quantized, strict=True))
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if not floats:
        result.rankable = False
        return
    x, y = floats[0]
    is_ranking = x.dim() == 2 and x.shape[1] > 1
    result.rankable &= is_ranking
    if is_ranking:
        classes = x.argmax(1)
        result.samples += len(classes)
        is_same = classes == y.argmax(1)
        result.agreeing += int(is_same.sum())
    target = batch.target
    is_index = target is not None and not target.is_floating_point()
    if is_index and (is_ranking or x.dim() == 3):
        result.float_score.add(x, batch)
        result.quantized_score.add(y, batch)
