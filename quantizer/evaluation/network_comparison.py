"""The networks of a test, and the result of comparing a float and a quantized one on several
batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from quantizer.comparison.extents import (
    MAX_LOST,
    MIN_EFFECT,
    ChannelNoise,
    column_energy,
    effect_errors,
)
from quantizer.comparison.noise import Noise, beside_mask_constants
from quantizer.comparison.output_figures import (
    POOLED_FIGURE,
    ROWS_KEPT,
    WORST_SAMPLES,
    OutputFigures,
    lowest_cosine,
    pooled_noise,
    worst,
    worst_samples_db,
)
from quantizer.comparison.perplexity import Score
from quantizer.graph.channels.output_parts import Output, parts_named_as
from quantizer.graph.edits import by_channel, input_weights
from quantizer.graph.ir import Node
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import Approximation, noise_energies
from quantizer.plan.readers import InputReaders, channel_names, input_readers
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.storage.deferred_tensor import loaded


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
        others = None if self.is_bounded else beside_mask_constants(x)
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
        figures = (*self.outputs, *self.quantization)
        other_figures = (*other.outputs, *other.quantization)
        for output, other_output in zip(figures, other_figures, strict=True):
            output.merge(other_output)
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
        metrics = {}
        for output in self.outputs:
            for row in output.rows:
                samples = row.sample_figures
                figures = {
                    "sqnr_db": row.sqnr_db,
                    WORST_SAMPLES: None if samples is None else samples.worst_db,
                    "cosine": row.cosine,
                    "equal_outputs": row.equal_share,
                }
                if row is output.whole and output.order is not None and output.order.rows:
                    figures[ROWS_KEPT] = output.order.share
                for figure, value in figures.items():
                    for name in (row.name, row.index):
                        if name and value is not None:
                            metrics[f"{figure}[{name}]"] = value
        return metrics

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
        return in_pairs(self.float_score.metrics(), self.quantized_score.metrics())


def in_pairs(
    before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Return the metrics that both networks have, by name.

    >>> in_pairs({"top1": 0.9, "loss": 0.1}, {"top1": 0.8})
    {'top1': {'float': 0.9, 'quantized': 0.8}}
    """
    pairs = {}
    for name, value in before.items():
        if name in after:
            pairs[name] = {"float": value, "quantized": after[name]}
    return pairs


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

    @classmethod
    def of(cls, calibrated: Calibrated, batches: Batches) -> Networks:
        """Return the networks of a calibration."""
        user = calibrated.user_graph
        return cls(
            Network(calibrated.float_graph),
            calibrated.network(),
            None if user is None else Network(user),
            batches,
            calibrated.original.device,
            calibrated.outputs,
        )

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


@dataclass(frozen=True)
class InputEffects:
    """The effects of the channels of an input on the layers that multiply them.

    Args:
        readers: the layers, and the channels that they read.
        quantizer: of these layers' own input, if there is one.
        noise: of the channels; None before a batch.
        effects: [channels] shares of the largest effect; None before all batches have run.
        errors: [channels] what quantization takes from each effect, as a share of it.
    """

    readers: InputReaders
    quantizer: TensorQuantizer | None = None
    noise: ChannelNoise | None = None
    effects: Tensor | None = None
    errors: Tensor | None = None

    @property
    def source(self) -> str:
        """Return the node whose value the layers read."""
        return self.readers.group.source

    def with_batch(self, x: Tensor, y: Tensor) -> InputEffects:
        """Return it with the float and the quantized values of a batch."""
        if x.shape != y.shape or not x.numel():
            return self
        if self.quantizer is not None:
            y = self.quantizer.quantized_copy(y)
        noise = ChannelNoise.of(x, y, self.readers.group.axis)
        return self.merged(replace(self, noise=noise))

    def merged(self, other: InputEffects) -> InputEffects:
        """Return both, where the other one has later batches."""
        if self.noise is None or other.noise is None:
            return replace(self, noise=self.noise or other.noise)
        return replace(self, noise=self.noise.merged(other.noise))

    def measured(self, reference: Network, quantized: Network) -> InputEffects:
        """Return it with the effects, from the weights of the layers in both networks."""
        if self.noise is None:
            return self
        columns = []
        for name in self.readers.group.layers:
            node = reference.graph.by_name[name]
            for key in input_weights(node):
                exact = _columns(reference, node, key)
                rounded = _columns(quantized, node, key)
                difference = rounded - exact
                energy = column_energy(exact.square())
                error = column_energy(difference.square())
                columns.append((energy, error))
        effects, errors = effect_errors(self.noise, columns)
        tiny = torch.finfo(effects.dtype).tiny
        largest = effects.max().clamp_min(tiny)
        return replace(self, effects=effects / largest, errors=errors)

    @property
    def lost(self) -> list[int]:
        """Return the channels that have an effect, and lose more than a fifth of it."""
        if self.effects is None or self.errors is None:
            return []
        is_heard = self.effects >= MIN_EFFECT
        is_lost = is_heard & (self.errors > MAX_LOST)
        indices: list[int] = is_lost.nonzero().flatten().tolist()
        return indices

    @property
    def warning(self) -> str:
        """Return a sentence on the channels that are lost; "" if there are none."""
        if not self.lost or self.errors is None:
            return ""
        errors = self.errors[self.lost]
        # An error of more than the effect itself
        largest = min(1.0, float(errors.max()))
        count = f"{len(self.lost)} of {len(self.errors)}"
        names = channel_names(self.lost)
        where = self.readers.channels_text(names)
        layer = self.readers.group.layers[0]
        return (
            f"{count} input channels lose more than a fifth of their effect on {layer}: "
            f"{where} lose up to {largest:.0%}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name, with an effect and an error for each channel."""
        row: dict[str, Any] = {
            "input": self.readers.name,
            "layers": list(self.readers.group.layers),
        }
        if self.effects is not None and self.errors is not None:
            row["effects"] = _rounded(self.effects)
            row["errors"] = _rounded(self.errors)
        return row


def _rounded(values: Tensor) -> list[float | None]:
    """Return figures with six digits behind the point; None for those that are not finite."""
    figures: list[float | None] = []
    for figure in values.tolist():
        rounded = None
        if math.isfinite(figure):
            rounded = round(figure, 6)
        figures.append(rounded)
    return figures


def _columns(network: Network, node: Node, key: str) -> Tensor:
    """Return a weight of a layer, [groups, a group's outputs, its inputs, taps]."""
    parameter = network.layers[node.name].get_parameter(key)
    weight = loaded(parameter).detach()
    return by_channel(node, weight).float()


def empty_effects(quantized: Network) -> list[InputEffects]:
    """Return the inputs of a network whose channels layers multiply, without a batch."""
    rows = []
    for readers in input_readers(quantized.graph, with_sums=True):
        quantizers = quantized.layers[readers.group.layers[0]].quantizers
        quantizer = None
        if "input" in quantizers:
            quantizer = cast(TensorQuantizer, quantizers["input"])
        rows.append(InputEffects(readers, quantizer))
    return rows
