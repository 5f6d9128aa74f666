"""Holds the ranges of outputs, and of their channels, in the float network and the quantized
one. Measures what quantization leaves of each channel's variation, so that a channel of large
values cannot hide the loss of a small one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.noise import Moments, Noise

MIN_VALUES = 4
"""With fewer values, nothing is said of values that become equal: that may be chance."""
MIN_FOR_RANGE = 8
"""With fewer values, nothing is said of a narrow range: that may be chance."""
_FLAT = 1e-3
"""Values that differ by less than this share of the largest count as one value."""
_NARROW = 0.25
"""Values that differ by less than this share of the largest have a narrow range: their SQNR is
high though their error may be as large as what varies."""
_MAX_ERROR = 0.2
"""A larger root mean square of the error, as a share of the standard deviation of values with a
narrow range, is a loss.
"""


@dataclass
class Extent:
    """The least and the greatest of some values; empty at first."""

    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, x: Tensor) -> Extent:
        """Return the extent of a tensor, which may be empty."""
        if not x.numel():
            return cls()
        low, high = x.aminmax()
        return cls(float(low), float(high))

    def merge(self, other: Extent) -> None:
        """Add other batches."""
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def is_empty(self) -> bool:
        """Return whether there was no value."""
        return self.low == math.inf and self.high == -math.inf

    @property
    def may_be_narrow(self) -> bool:
        """Return what `may_be_narrow` says of the values; False if there are none."""
        if self.is_empty:
            return False
        low = torch.tensor(self.low)
        high = torch.tensor(self.high)
        return bool(may_be_narrow(low, high))

    @property
    def is_finite(self) -> bool:
        """Return whether there are neither NaN nor infinity among the values."""
        return self.is_empty or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def is_constant(self) -> bool:
        """Return whether all values are equal."""
        return self.low == self.high


def is_flat(extent: Extent) -> bool:
    """Return whether values differ by so little that they count as one value."""
    largest = max(abs(extent.low), abs(extent.high))
    return extent.high - extent.low <= _FLAT * largest


def may_be_narrow(low: Tensor, high: Tensor) -> Tensor:
    """Return whether values from low to high may turn out to be narrow over all batches. In one
    batch the largest value may be smaller.
    """
    return high - low < 2 * _NARROW * _largest(low, high)


def _largest(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest magnitude of values from low to high."""
    return torch.maximum(low.abs(), high.abs())


def is_lost(low: Tensor, high: Tensor, moments: Moments, rms_error: Tensor) -> Tensor:
    """Return whether an error is large against the deviation of values in a narrow range from
    low to high. What varies by float's own rounding counts as constant.

    >>> x = torch.tensor([[299.9, 299.9, -0.1], [300.1, 300.1, 0.1]])
    >>> is_lost(x[0], x[1], Moments.of(x, [0]), torch.tensor([0.1, 0.01, 0.1]))
    tensor([ True, False, False])
    """
    is_narrow = high - low < _NARROW * _largest(low, high)
    is_large = rms_error > _MAX_ERROR * moments.deviation
    return is_narrow & moments.is_varying & is_large


def varying_noise(squares: float, error: float) -> Noise:
    """Return the noise of values without the energy of what does not vary. The error counts as
    independent of the values.

    Args:
        squares: the sum of the squared distances from their mean.
        error: the sum of the squared error.

    >>> round(varying_noise(100.0, 25.0).sqnr_db, 2)
    6.02
    """
    return Noise(squares, squares + error, error)


@dataclass
class ChannelExtents:
    """The range of each channel of an output in both networks.

    Args:
        axis: of the channels.
        count: the values of each channel.
        low: [channels] least values in the float network.
        high: [channels] greatest values in the float network.
        other_low: [channels] least values in the quantized network.
        other_high: [channels] greatest values in the quantized network.
        error: [channels] sums of the squared error, float64; 0 where values are far apart.
        moments: of each channel; 0 where values are far apart.
    """

    axis: int
    count: int
    low: Tensor
    high: Tensor
    other_low: Tensor
    other_high: Tensor
    error: Tensor
    moments: Moments

    @classmethod
    def of(cls, x: Tensor, y: Tensor, axis: int) -> ChannelExtents | None:
        """Return the ranges of one batch.

        They are None if there is no such axis, there are no values, or the shapes differ.
        """
        if x.dim() <= axis or not x.numel() or x.shape != y.shape:
            return None
        count = x.numel() // x.shape[axis]
        low, high = ends_along(x, axis)
        other_low, other_high = ends_along(y, axis)
        channels = _indices(may_be_narrow(low, high))
        error = torch.zeros(len(low), dtype=torch.float64)
        moments = Moments(count, error.clone(), error.clone())
        if channels:
            index = torch.tensor(channels, dtype=torch.int64, device=x.device)
            expected = x.index_select(axis, index).float()
            actual = y.index_select(axis, index).float()
            axes = other_axes(x, axis)
            squares = (expected - actual).square()
            if axes:
                # torch takes no axes for all of them
                squares = squares.sum(axes)
            error[channels] = squares.double().cpu()
            narrow = Moments.of(expected, axes)
            moments.mean[channels] = narrow.mean
            moments.squares[channels] = narrow.squares
        return cls(axis, count, low, high, other_low, other_high, error, moments)

    @property
    def whole(self) -> tuple[Extent, Extent]:
        """Return the ranges of all channels together, in both networks."""
        reference = Extent(float(self.low.min()), float(self.high.max()))
        other = Extent(float(self.other_low.min()), float(self.other_high.max()))
        return reference, other

    def merged(self, other: ChannelExtents) -> ChannelExtents | None:
        """Return the ranges over both; None if the numbers of channels differ."""
        if self.low.shape != other.low.shape:
            return None
        return ChannelExtents(
            self.axis,
            self.count + other.count,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            torch.minimum(self.other_low, other.other_low),
            torch.maximum(self.other_high, other.other_high),
            self.error + other.error,
            self.moments.merged(other.moments),
        )

    @property
    def collapsed(self) -> list[int]:
        """Return the channels whose values differ in the float network and are all equal in the
        quantized one.
        """
        if self.count < MIN_VALUES or len(self.low) < 2:
            return []
        spread = self.high - self.low
        largest = _largest(self.low, self.high)
        is_constant = self.other_low == self.other_high
        is_flat = spread <= _FLAT * largest
        return _indices(is_constant & ~is_flat)

    @property
    def lost(self) -> list[int]:
        """Return the channels with a narrow range far from zero that lose what varies."""
        if self.count < MIN_FOR_RANGE or len(self.low) < 2:
            return []
        rms_error = (self.error / self.count).sqrt()
        return _indices(is_lost(self.low, self.high, self.moments, rms_error))

    @property
    def lost_noise(self) -> list[Noise]:
        """Return the noise of each lost channel, without the energy of what does not vary."""
        squares = self.moments.squares.tolist()
        errors = self.error.tolist()
        return [varying_noise(squares[index], errors[index]) for index in self.lost]


def _indices(is_true: Tensor) -> list[int]:
    """Return the places of a vector that are true."""
    places: list[int] = is_true.nonzero().flatten().tolist()
    return places


def ends_along(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value at each index of an axis."""
    axes = other_axes(values, axis)
    if not axes:
        # torch takes no axes for all of them
        ends = values.float().cpu()
        return ends, ends
    low = values.amin(axes)
    high = values.amax(axes)
    return low.float().cpu(), high.float().cpu()


def other_axes(values: Tensor, axis: int) -> list[int]:
    """Return all axes of a tensor except one."""
    axes = list(range(values.dim()))
    del axes[axis]
    return axes


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
