"""Measures what quantization leaves of each channel's variation, so that a channel of large
values cannot hide the loss of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.extents import other_axes
from quantizer.comparison.noise import Moments

MAX_LOST = 0.2
"""An error of more than this share of a channel's effect is a loss."""
MIN_EFFECT = 0.01
"""Channels with less than this share of the largest effect are not judged."""
_STEPS_TO_RMS = math.sqrt(12)
"""Rounding to multiples of a step has an error of the step divided by this number."""


@dataclass(frozen=True)
class ChannelNoise:
    """How much each channel of a tensor varies, and how much its error does.

    A constant error of a channel takes nothing from its variation, so it does not count.

    Args:
        values: [channels] of the float values.
        error: [channels] of the error.
    """

    values: Moments
    error: Moments

    @classmethod
    def of(cls, x: Tensor, y: Tensor, axis: int) -> ChannelNoise:
        """Return the noise of one batch.

        Args:
            x: the float values.
            y: their approximation, in the same shape.
            axis: of the channels.
        """
        axes = other_axes(x, axis)
        return cls(Moments.of(x, axes), Moments.of(y.float() - x.float(), axes))

    def merged(self, other: ChannelNoise) -> ChannelNoise:
        """Return the noise over both batches."""
        return ChannelNoise(self.values.merged(other.values), self.error.merged(other.error))

    @property
    def codes_per_deviation(self) -> Tensor:
        """Return how many codes each channel has per standard deviation, infinity without an
        error. Channels whose values all have one code seem to have 0.3.
        """
        return self.values.deviation / (self.error.deviation * _STEPS_TO_RMS)


def effect_errors(
    noise: ChannelNoise, columns: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the effect of each channel on the layers that multiply it, and what is lost of it.

    To first order, the effect of a channel is its standard deviation times the norm of its
    weights. Its error is that of the channel and that of the weights.

    Args:
        noise: of the channels.
        columns: for each layer, the energy of the weights of each channel and that of their
            error, [channels] each. Without a layer, all channels have equal weights.

    Returns:
        [channels] effects, and [channels] errors as shares of these; 0 for constant channels.
    """
    values = noise.values
    weights = torch.zeros_like(values.mean)
    errors = torch.zeros_like(values.mean)
    is_weighted = False
    for energy, error in columns:
        weights += energy
        errors += error
        is_weighted = True
    if not is_weighted:
        weights += 1
    shares = noise.error.squares / values.squares + errors / weights
    effects = values.deviation * weights.sqrt()
    has_effect = values.is_varying & (effects > 0)
    return effects * has_effect, torch.where(has_effect, shares, 0.0).sqrt()


def column_energy(squares: Tensor) -> Tensor:
    """Return the sum of squares of each input channel's weights, [channels].

    Args:
        squares: [groups, a group's outputs, its inputs, taps].
    """
    return squares.sum((1, 3)).flatten().cpu().double()
