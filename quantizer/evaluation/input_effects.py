"""Measures how much of the effect of each input channel a quantized network keeps. One channel
may dominate an output, whose SQNR then hides the loss of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
from quantizer.graph.edits import by_channel, input_weights
from quantizer.graph.ir import Node
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.plan.readers import InputReaders, channel_names, input_readers
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
