"""Orthogonal matrices with entries of nearly equal size, as products of two small factors; no
tables of matrices.
"""

import math

import torch
from torch import Tensor

_LARGEST = 512  # orders of Hadamard matrices that Paley's construction is tried for


def rotated(values: Tensor, signs: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Each row along the last axis times a fixed orthogonal matrix: signs, then the two
    factors.

    `signs` has +1 or -1 for each of the n = a * b channels, `left` [a, a] and `right` [b, b]
    are `factors(n)` in the dtype of `values`. Costs n * (a + b) products a row, which is less
    time than log2(n) passes of additions.

    >>> n = 12
    >>> left, right = factors(n)
    >>> turned = rotated(
    ...     torch.eye(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64), left, right
    ... )
    >>> bool(torch.allclose(turned @ turned.T, torch.eye(n, dtype=torch.float64)))
    True
    """
    table = (values * signs).reshape(*values.shape[:-1], len(left), len(right))
    # The result is left transposed: its order is as good as any.
    return torch.matmul((table @ right).transpose(-1, -2), left.T).flatten(-2)


def factors(channels: int) -> tuple[Tensor, Tensor]:
    """Orthogonal float64 matrices [a, a] and [b, b] with a * b = `channels`, close in size, for
    `rotated`.

    The second is Sylvester's Hadamard matrix, the first another times `core` for what is not a
    power of two.
    """
    odd = channels
    while odd % 2 == 0:
        odd //= 2
    kernel = core(odd, channels // odd)
    twos = channels // len(kernel)
    left = 1
    while left < twos and len(kernel) * left * left < twos:
        left *= 2
    return torch.kron(_sylvester(left), kernel), _sylvester(twos // left)


def core(odd: int, twos: int) -> Tensor:
    """An orthogonal float64 matrix [odd * 2^j, odd * 2^j], 2^j a divisor of `twos`.

    It is Paley's Hadamard matrix (Paley 1933) where odd * 2^j - 1 is a prime that is 3 modulo
    4, all entries of one size; else the discrete Hartley transform of order `odd`, whose
    entries are at most sqrt(2 / odd).

    >>> len(core(3, 512)), len(core(5, 4)), len(core(43, 256)), len(core(1, 64))
    (12, 20, 43, 1)
    """
    order = 4 * odd
    while odd > 1 and order <= min(odd * twos, _LARGEST):
        # A prime
        if all((order - 1) % divisor for divisor in range(2, math.isqrt(order - 1) + 1)):
            return _paley(order)
        order *= 2
    angles = (torch.outer(torch.arange(odd), torch.arange(odd)) % odd).double() * (
        2 * math.pi / odd
    )
    return (angles.cos() + angles.sin()) / math.sqrt(odd)


def _paley(order: int) -> Tensor:
    """I + S, where the skew S has the quadratic residues modulo the prime order - 1; scaled to
    be orthogonal.
    """
    prime = order - 1
    character = -torch.ones(prime, dtype=torch.float64)
    character[torch.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    numbers = torch.arange(prime)
    matrix = torch.ones(order, order, dtype=torch.float64)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = character[(numbers[:, None] - numbers) % prime] + torch.eye(
        prime, dtype=torch.float64
    )
    return matrix / math.sqrt(order)


def _sylvester(order: int) -> Tensor:
    """The Hadamard matrix of a power of two, scaled to be orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(order)
