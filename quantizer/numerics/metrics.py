"""Measures of how close two tensors are, such as the SQNR. Sums are float64."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.numerics.blocks import flat_view, flatten_memory, memory_order, scratch

# Values converted to float64 at a time: they stay in the cache
VALUES_PER_SUM = 1 << 18


def energy(x: Tensor) -> float:
    """Return the sum of the squares of `x`, a floating-point tensor, summed in float64.

    >>> energy(torch.tensor([3.0, 4.0]))
    25.0
    """
    sums = _sums_of_squares(x)
    return _total(sums)


@dataclass(frozen=True)
class Approximation:
    """An approximation of a tensor.

    Args:
        values: of the shape of the tensor.
        function: changes each of `values` by itself, not in place; None if nothing is changed.
        is_measured: whether the energy of the approximation is wanted.
    """

    values: Tensor
    function: Callable[[Tensor], Tensor] | None = None
    is_measured: bool = True

    def of(self, values: Tensor) -> Tensor:
        """Return the approximation of some values."""
        return values if self.function is None else self.function(values)

    def masked(self, is_counted: Tensor) -> "Approximation":
        """Return the approximation of the values that a mask selects."""
        values = self.of(self.values)[is_counted]
        return Approximation(values, None, self.is_measured)


@dataclass(frozen=True)
class Energies:
    """The energies of an approximation y of a tensor x.

    Attributes:
        other: |y|^2; 0 if it is not wanted.
        error: |x - y|^2.
    """

    other: float
    error: float


def noise_energies(
    x: Tensor, approximations: Sequence[Approximation]
) -> tuple[float, list[Energies]]:
    """Return the energy of `x`, and the energies of each approximation: what `energy` returns
    for each tensor.

    All tensors are read once, in parts that stay in the cache.

    >>> x = torch.tensor([3.0, 4.0])
    >>> noise_energies(x, [Approximation(x + 1)])
    (25.0, [Energies(other=41.0, error=2.0)])
    """
    signals: list[Tensor] = []
    others: list[list[Tensor]] = [[] for _ in approximations]
    errors: list[list[Tensor]] = [[] for _ in approximations]
    for part, *values in _parts(x, approximations):
        signals += _sums_of_squares(part)
        for index, approximation in enumerate(approximations):
            other = approximation.of(values[index])
            if approximation.is_measured:
                others[index] += _sums_of_squares(other)
            errors[index] += _sums_of_squares(_difference(part, other))
    energies = []
    for other_sums, error_sums in zip(others, errors, strict=True):
        row = Energies(_total(other_sums), _total(error_sums))
        energies.append(row)
    return _total(signals), energies


def row_energies(x: Tensor, y: Tensor) -> Tensor:
    """Return |x|^2, |y|^2 and |x - y|^2 of each index of axis 0, float64 [3, rows] on the CPU.

    Args:
        x: [rows, ...] floating point, with at least one value.
        y: of the same shape.

    >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> row_energies(x, x + 1)
    tensor([[25.,  1.],
            [41.,  5.],
            [ 2.,  2.]], dtype=torch.float64)
    """
    order = [0]
    for axis in memory_order(x[0]):
        order.append(axis + 1)
    count = len(x)
    x = x.detach().permute(order).reshape(count, -1)
    y = y.detach().permute(order).reshape(count, -1)
    length = x.shape[1]
    rows = max(1, VALUES_PER_SUM // length)
    sums = torch.zeros(3, count, dtype=torch.float64, device=x.device)
    for first in range(0, count, rows):
        stop = first + rows
        for start in range(0, length, VALUES_PER_SUM):
            end = start + VALUES_PER_SUM
            x_part = x[first:stop, start:end]
            y_part = y[first:stop, start:end]
            of_rows = sums[:, first:stop]
            of_rows[0] += _squares_by_row(x_part)
            of_rows[1] += _squares_by_row(y_part)
            of_rows[2] += _squares_by_row(x_part - y_part)
    return sums.cpu()


def _squares_by_row(x: Tensor) -> Tensor:
    """Return the sum of the squares of each row of a matrix, in float64."""
    wide = _as_float64(x)
    if len(wide) == 1:
        return torch.dot(wide[0], wide[0])
    return wide.square_().sum(1)


def _parts(x: Tensor, approximations: Sequence[Approximation]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the values of `x` and of each approximation in parts, in the order of memory.

    They are one part if the tensors have different layouts.
    """
    tensors = [x.detach()]
    for approximation in approximations:
        tensors.append(approximation.values.detach())
    parts = []
    for tensor in tensors:
        flat = flat_view(tensor)
        is_alike = tensor.stride() == x.stride() and tensor.dtype == x.dtype
        if flat is None or not is_alike:
            yield tuple(tensors)
            return
        parts.append(torch.split(flat, VALUES_PER_SUM))
    yield from zip(*parts, strict=True)


def _difference(x: Tensor, other: Tensor) -> Tensor:
    """Return x - other, in memory that the next call may overwrite."""
    if x.dim() != 1 or x.numel() > VALUES_PER_SUM or x.dtype != other.dtype:
        # The layout of the difference decides the order of its sums
        return x - other
    return torch.sub(x, other, out=scratch(x))


def _sums_of_squares(x: Tensor) -> list[Tensor]:
    """Return the sum of the squares of each part of `x`, in float64."""
    sums = []
    # Reading in another order than that of memory takes many times as long
    for part in torch.split(flatten_memory(x.detach()), VALUES_PER_SUM):
        wide = _as_float64(part)
        sums.append(torch.dot(wide, wide))
    return sums


def _as_float64(x: Tensor) -> Tensor:
    """Return `x` in float64, in memory that the next call may overwrite."""
    wide = scratch(x, torch.float64)
    return x.double() if wide is None else wide.copy_(x)


def _total(sums: Sequence[Tensor]) -> float:
    """Return the sum of tensors with one value each."""
    if not sums:
        return 0.0
    # One copy from a GPU, which would otherwise wait for each sum
    values = torch.stack(list(sums))
    return math.fsum(values.tolist())


def decibel(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) of two energies.

    It is inf without noise, and -inf without signal or if the noise is infinite or NaN.

    >>> decibel(100.0, 1.0)
    20.0
    """
    if noise == 0:
        return math.inf
    if signal > 0 and math.isfinite(noise):
        return 10 * math.log10(signal / noise)
    return -math.inf


def sqnr_db(reference: Tensor, other: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum r^2 / sum (r - o)^2) in dB.

    Both tensors are floating point. Over batches, add up the energies and use `decibel`.

    Raises:
        ValueError: the shapes differ.

    >>> round(sqnr_db(torch.tensor([1.0, 1.0]), torch.tensor([0.9, 1.1])), 3)
    20.0
    """
    if reference.shape != other.shape:
        raise ValueError(
            f"The tensors differ in shape: {tuple(reference.shape)} and {tuple(other.shape)}."
        )
    return decibel(energy(reference), energy(reference - other))
