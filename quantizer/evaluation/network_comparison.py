"""The networks of a test, and the result of comparing a float and a quantized one on several
batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise, beside_far_values
from quantizer.comparison.output_figures import (
    POOLED_FIGURE,
    ROWS_KEPT,
    WORST_SAMPLES,
    OutputFigures,
    lowest_cosine,
    named_metrics,
    pooled_noise,
    worst,
    worst_samples_db,
)
from quantizer.comparison.perplexity import TokenLoss, next_tokens
from quantizer.evaluation.input_effects import InputEffects
from quantizer.graph.channels.output_parts import Output, parts_named_as
from quantizer.nn.network import Network
from quantizer.numerics.metrics import Approximation, noise_energies
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches


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
        self, x: Tensor, local: Approximation, accumulated: Approximation | None = None
    ) -> None:
        """Add one batch of float values and their two quantized versions."""
        approximations = [local]
        if accumulated is not None:
            approximations.append(accumulated)
        others = None if self.is_bounded else beside_far_values(x)
        if others is not None:
            x = x[others]
            approximations = [row.masked(others) for row in approximations]
        signal, energies = noise_energies(x, approximations)
        self.local.add_energies(signal, energies[0])
        if self.accumulated is not None and accumulated is not None:
            self.accumulated.add_energies(signal, energies[1])

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
        inputs: the effects of input channels.
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
    inputs: list[InputEffects] = field(default_factory=list)
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
        pairs = zip(self.inputs, other.inputs, strict=True)
        self.inputs = [row.merged(other_row) for row, other_row in pairs]
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
            lowest_of_samples = worst_samples_db(self.outputs)
            if lowest_of_samples is not None:
                metrics[WORST_SAMPLES] = lowest_of_samples
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


@dataclass(frozen=True)
class Networks:
    """The networks that a test compares.

    Attributes:
        reference: the float network.
        quantized: the quantized network.
        user: the user's model, if outputs are compared with it instead of `reference`.
        batches: of the test.
        device: of all networks.
        outputs: of the network that outputs are compared with.
    """

    reference: Network
    quantized: Network
    user: Network | None
    batches: Batches
    device: torch.device
    outputs: Sequence[Output]

    @property
    def all(self) -> list[Network]:
        """Return the networks."""
        networks = [self.reference, self.quantized]
        if self.user is not None:
            networks.append(self.user)
        return networks

    @cached_property
    def float_outputs(self) -> Sequence[Output]:
        """Return the outputs of `reference`, with the names of the user's model."""
        if self.user is None:
            return self.outputs
        return parts_named_as(self.reference.graph, self.user.graph)

    @cached_property
    def first(self) -> Batch:
        """Return the first batch, which is read once, on demand."""
        return next(iter(self.batches)).to(self.device)
