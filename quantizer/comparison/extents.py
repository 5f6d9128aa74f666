"""Holds the ranges of outputs, and of their channels, in the float network and the quantized
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise

MIN_VALUES = 4
"""With fewer values, nothing is said of values that become equal: that may be chance."""
MIN_FOR_RANGE = 8
"""With fewer values, nothing is said of a narrow range: that may be chance."""
_FLAT = 1e-3
"""Values that differ by less than this share of the largest count as one value."""
_NARROW = 0.25
"""Values that differ by less than this share of the largest have a narrow range: their SQNR is
high though their error may be as large as what varies."""
_MIN_RANGE = 1e-5
"""A range below this share of the largest value is float32's own rounding."""
_ROUNDING = 1e-6
"""A standard deviation below this share of the values is float32's own rounding."""
_MAX_ERROR = 0.2
"""A larger root mean square of the error, as a share of a narrow range, is a loss."""


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
    def is_finite(self) -> bool:
        """Return whether there are neither NaN nor infinity among the values."""
        is_empty = self.low == math.inf and self.high == -math.inf
        return is_empty or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def is_constant(self) -> bool:
        """Return whether all values are equal."""
        return self.low == self.high


def is_flat(extent: Extent) -> bool:
    """Return whether values differ by so little that they count as one value."""
    largest = max(abs(extent.low), abs(extent.high))
    return extent.high - extent.low <= _FLAT * largest


def varies(deviation: Tensor, size: Tensor) -> Tensor:
    """Return whether values of this standard deviation and size differ by more than the
    rounding of float.
    """
    return deviation > _ROUNDING * size


def _is_narrow(low: Tensor, high: Tensor) -> Tensor:
    """Return whether values from low to high differ by little, compared with the largest."""
    largest = _largest(low, high)
    spread = high - low
    is_more_than_rounding = spread > _MIN_RANGE * largest
    return is_more_than_rounding & (spread < _NARROW * largest)


def _largest(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest magnitude of values from low to high."""
    return torch.maximum(low.abs(), high.abs())


def is_lost(low: Tensor, high: Tensor, rms_error: Tensor) -> Tensor:
    """Return whether an error is large against a narrow range of values from low to high.

    >>> low, high = torch.tensor([299.9, 299.9, -0.1]), torch.tensor([300.1, 300.1, 0.1])
    >>> is_lost(low, high, torch.tensor([0.1, 0.01, 0.1]))
    tensor([ True, False, False])
    """
    spread = high - low
    is_large = rms_error > _MAX_ERROR * spread
    return _is_narrow(low, high) & is_large


def varying_noise(low: float, high: float, count: int, error: float) -> Noise:
    """Return the noise of values from low to high without the energy of what does not vary.

    Each value counts as half of the range, and the error as independent of the values.

    Args:
        low, high: the ends of the range.
        count: how many values there are.
        error: the sum of the squared error.

    >>> round(varying_noise(299.0, 301.0, 100, 25.0).sqnr_db, 2)
    6.02
    """
    half = (high - low) / 2
    signal = count * half * half
    return Noise(signal, signal + error, error)


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
    """

    axis: int
    count: int
    low: Tensor
    high: Tensor
    other_low: Tensor
    other_high: Tensor
    error: Tensor

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
        # Those that are narrow over all batches. In one batch the largest value may be smaller
        largest = _largest(low, high)
        may_be_narrow = high - low < 2 * _NARROW * largest
        channels = _indices(may_be_narrow)
        error = torch.zeros(len(low), dtype=torch.float64)
        if channels:
            error[channels] = _error_of(x, y, axis, channels)
        return cls(
            axis,
            count,
            low,
            high,
            other_low,
            other_high,
            error,
        )

    @property
    def whole(self) -> tuple[Extent, Extent]:
        """Return the ranges of all channels together, in both networks."""
        reference = _extent(self.low, self.high)
        other = _extent(self.other_low, self.other_high)
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
        mean_error = self.error / self.count
        lost = is_lost(self.low, self.high, mean_error.sqrt())
        return _indices(lost)

    @property
    def lost_noise(self) -> list[Noise]:
        """Return the noise of each lost channel, without the energy of what does not vary."""
        noises = []
        for index in self.lost:
            low, high = float(self.low[index]), float(self.high[index])
            noises.append(varying_noise(low, high, self.count, float(self.error[index])))
        return noises


def _extent(low: Tensor, high: Tensor) -> Extent:
    """Return the range of all channels together."""
    least = float(low.min())
    greatest = float(high.max())
    return Extent(least, greatest)


def _indices(is_true: Tensor) -> list[int]:
    """Return the places of a vector that are true."""
    places: list[int] = is_true.nonzero().flatten().tolist()
    return places


def _error_of(
    x: Tensor,
    y: Tensor,
    axis: int,
    channels: list[int],
) -> Tensor:
    """Return the sum of the squared error of some channels, float64."""
    index = torch.tensor(channels, dtype=torch.int64, device=x.device)
    expected = x.index_select(axis, index)
    actual = y.index_select(axis, index)
    difference = expected.float() - actual.float()
    squares = difference.square()
    axes = other_axes(x, axis)
    return squares.sum(axes).double().cpu()


def ends_along(
    values: Tensor,
    axis: int,
) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value at each index of an axis."""
    axes = other_axes(values, axis)
    low = values.amin(axes)
    high = values.amax(axes)
    return low.float().cpu(), high.float().cpu()


def other_axes(values: Tensor, axis: int) -> list[int]:
    """Return all axes of a tensor except one."""
    axes = list(range(values.dim()))
    del axes[axis]
    return axes
