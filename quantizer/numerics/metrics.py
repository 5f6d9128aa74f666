"""Measures of how close two tensors are: SQNR, cosine, top-1 agreement. Sums are float64."""

import math

import torch
from torch import Tensor

from quantizer.numerics.blocks import flatten_memory, memory_order

# Values converted to float64 at a time: they stay in the cache
VALUES_PER_SUM = 1 << 18


def energy(x: Tensor) -> float:
    """Return the sum of the squares of `x`, a floating-point tensor, summed in float64.

    >>> energy(torch.tensor([3.0, 4.0]))
    25.0
    """
    sums = []
    # Reading in another order than that of memory takes many times as long
    for part in torch.split(flatten_memory(x), VALUES_PER_SUM):
        wide = part.double()
        sums.append(torch.dot(wide, wide))
    # One copy from a GPU, which would otherwise wait for each sum
    return math.fsum(torch.stack(sums).tolist())


def decibel(
    signal: float,
    noise: float,
) -> float:
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


def sqnr_db(
    reference: Tensor,
    other: Tensor,
) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum r^2 / sum (r - o)^2) in dB.

    Both tensors are floating point. Over batches, add up the energies and use `decibel`.

    Raises:
        ValueError: the shapes differ.

    >>> round(sqnr_db(torch.tensor([1.0, 1.0]), torch.tensor([0.9, 1.1])), 3)
    20.0
    """
    _check(reference, other)
    return decibel(energy(reference), energy(reference - other))


def cosine(
    reference: Tensor,
    other: Tensor,
) -> float:
    """Return sum(r o) / sqrt(sum r^2 sum o^2) over all elements.

    It is 1 for two zero tensors and 0 if only one is zero.

    Raises:
        ValueError: the shapes differ.

    >>> round(cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) ** 2, 6)
    0.5
    """
    _check(reference, other)
    product = math.sqrt(energy(reference)) * math.sqrt(energy(other))
    if product == 0:
        return float(energy(reference) == energy(other))
    return _dot(reference, other) / product


def top1_agreement(
    reference: Tensor,
    other: Tensor,
) -> float:
    """Return the share of positions where both have their largest value at the same class.
    Classes are dimension 1.

    Raises:
        ValueError: the shapes differ or there is no dimension 1.

    >>> top1_agreement(
    ...     torch.tensor([[0.1, 0.9], [0.7, 0.3]]), torch.tensor([[0.4, 0.6], [0.2, 0.8]])
    ... )
    0.5
    """
    _check(reference, other)
    if reference.ndim < 2:
        raise ValueError(
            f"Classes are dimension 1 of the outputs, and {tuple(reference.shape)} has none."
        )
    return float((reference.argmax(1) == other.argmax(1)).double().mean())


def _dot(
    a: Tensor,
    b: Tensor,
) -> float:
    order = memory_order(a)
    a_parts = torch.split(a.permute(order).reshape(-1), VALUES_PER_SUM)
    b_parts = torch.split(b.permute(order).reshape(-1), VALUES_PER_SUM)
    sums = []
    for a_part, b_part in zip(a_parts, b_parts, strict=True):
        sums.append(float(torch.dot(a_part.double(), b_part.double())))
    return math.fsum(sums)


def _check(
    reference: Tensor,
    other: Tensor,
) -> None:
    if reference.shape != other.shape:
        raise ValueError(
            f"The tensors differ in shape: {tuple(reference.shape)} and {tuple(other.shape)}."
        )
