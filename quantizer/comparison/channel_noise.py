"""Measures what quantization leaves of each channel's variation, so that a channel of large
values cannot hide the loss of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.extents import other_axes, varies

MAX_LOST = 0.2
"""An error of more than this share of a channel's effect is a loss."""
MIN_EFFECT = 0.01
"""Channels with less than this share of the largest effect are not judged."""
_STEPS_TO_RMS = math.sqrt(12)
"""Rounding to multiples of a step has an error of the step divided by this number."""


@dataclass(frozen=True)
class ChannelNoise:
    """The standard deviation of each channel of a tensor, and that of its error.

    A constant error of a channel takes nothing from its variation, so it does not count.

    Args:
        count: the values of each channel.
        mean: [channels] means, float64.
        squares: [channels] sums of squared distances from the mean, float64.
        error_mean: [channels] means of the error.
        error_squares: [channels] sums of squared distances of the error from its mean.
    """

    count: int
    mean: Tensor
    squares: Tensor
    error_mean: Tensor
    error_squares: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, axis: int) -> ChannelNoise:
        """Return the noise of one batch.

        Args:
            x: the float values.
            y: their approximation, in the same shape.
            axis: of the channels.
        """
        axes = other_axes(x, axis % x.dim())
        count = x.numel() // x.shape[axis]
        x = x.float()
        variance, mean = torch.var_mean(x, axes, correction=0)
        error_variance, error_mean = torch.var_mean(y.float() - x, axes, correction=0)
        rows = (mean, variance * count, error_mean, error_variance * count)
        mean, squares, error_mean, error_squares = torch.stack(rows).cpu().double()
        return cls(count, mean, squares, error_mean, error_squares)

    def merged(self, other: ChannelNoise) -> ChannelNoise:
        """Return the noise over both batches.

        Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances", 1979, equation 1.5.
        """
        count = self.count + other.count
        share = other.count / count
        distance = other.mean - self.mean
        error_distance = other.error_mean - self.error_mean
        weight = self.count * share
        return ChannelNoise(
            count,
            self.mean + distance * share,
            self.squares + other.squares + distance.square() * weight,
            self.error_mean + error_distance * share,
            self.error_squares + other.error_squares + error_distance.square() * weight,
        )

    @property
    def deviation(self) -> Tensor:
        """Return the standard deviation of each channel."""
        return (self.squares / self.count).sqrt()

    @property
    def error_deviation(self) -> Tensor:
        """Return the standard deviation of the error of each channel."""
        return (self.error_squares / self.count).sqrt()

    @property
    def is_varying(self) -> Tensor:
        """Return whether each channel varies by more than float's own rounding."""
        return varies(self.deviation, self.mean.abs())

    @property
    def codes_per_deviation(self) -> Tensor:
        """Return how many codes each channel has per standard deviation, infinity without an
        error. Channels whose values all have one code seem to have 0.3.
        """
        return self.deviation / (self.error_deviation * _STEPS_TO_RMS)


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
    weights = torch.zeros_like(noise.mean)
    errors = torch.zeros_like(noise.mean)
    is_weighted = False
    for energy, error in columns:
        weights += energy
        errors += error
        is_weighted = True
    if not is_weighted:
        weights += 1
    variance = noise.squares / noise.count
    shares = noise.error_squares / noise.squares + errors / weights
    effects = (variance * weights).sqrt()
    has_effect = noise.is_varying & (effects > 0)
    return effects * has_effect, torch.where(has_effect, shares, 0.0).sqrt()


def column_energy(squares: Tensor) -> Tensor:
    """Return the sum of squares of each input channel's weights, [channels].

    Args:
        squares: [groups, a group's outputs, its inputs, taps].
    """
    return squares.sum((1, 3)).flatten().cpu().double()
