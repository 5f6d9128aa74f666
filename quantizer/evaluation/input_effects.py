"""Measures how much of the effect of each input channel a quantized network keeps. One channel
may dominate an output, whose SQNR then hides the loss of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from quantizer.comparison.channel_noise import (
    MAX_LOST,
    MIN_EFFECT,
    ChannelNoise,
    column_energy,
    effect_errors,
)
from quantizer.graph.edits import by_channel, input_weights
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.plan.input_readers import InputReaders, channel_names, input_readers
from quantizer.storage.deferred_tensor import loaded


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
            layers = reference.layers[name], quantized.layers[name]
            node = reference.graph.by_name[name]
            for key in input_weights(node):
                weights = [loaded(layer.get_parameter(key)).detach() for layer in layers]
                exact, rounded = (by_channel(node, weight).float() for weight in weights)
                energy = column_energy(exact.square())
                columns.append((energy, column_energy((rounded - exact).square())))
        effects, errors = effect_errors(self.noise, columns)
        largest = effects.max().clamp_min(torch.finfo(effects.dtype).tiny)
        return replace(self, effects=effects / largest, errors=errors)

    @property
    def lost(self) -> list[int]:
        """Return the channels that have an effect, and lose more than a fifth of it."""
        if self.effects is None or self.errors is None:
            return []
        is_lost = (self.effects >= MIN_EFFECT) & (self.errors > MAX_LOST)
        indices: list[int] = is_lost.nonzero().flatten().tolist()
        return indices

    @property
    def warning(self) -> str:
        """Return a sentence on the channels that are lost; "" if there are none."""
        if not self.lost or self.errors is None:
            return ""
        errors = self.errors[self.lost]
        count = f"{len(self.lost)} of {len(self.errors)}"
        where = self.readers.channels_text(channel_names(self.lost))
        layer = self.readers.group.layers[0]
        return (
            f"{count} input channels lose more than a fifth of their effect on {layer}: "
            f"{where} lose up to {min(1.0, float(errors.max())):.0%}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name, with an effect and an error for each channel."""
        row: dict[str, Any] = {
            "input": self.readers.name,
            "layers": list(self.readers.group.layers),
        }
        if self.effects is not None and self.errors is not None:
            row["effects"] = [round(value, 6) for value in self.effects.tolist()]
            row["errors"] = [round(value, 6) for value in self.errors.tolist()]
        return row


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
