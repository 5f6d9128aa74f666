"""Orthogonal matrices with entries of nearly equal size, as products of two small factors. No
matrix is stored.
"""

import math

import torch
from torch import Tensor

_LARGEST_ORDER = 512


def rotated(
    values: Tensor,
    signs: Tensor,
    left: Tensor,
    right: Tensor,
) -> Tensor:
    """Return each row along the last axis times a fixed orthogonal matrix: signs, then the two
    factors.

    `signs` has +1 or -1 for each of the n = a * b channels, `left` [a, a] and `right` [b, b]
    are `factors(n)` in the dtype of `values`. Costs n * (a + b) products a row, which is less
    time than log2(n) passes of additions.

    >>> n = 12
    >>> left, right = factors(n)
    >>> identity = torch.eye(n, dtype=torch.float64)
    >>> matrix = rotated(identity, torch.ones(n, dtype=torch.float64), left, right)
    >>> bool(torch.allclose(matrix @ matrix.T, identity))
    True
    """
    table = (values * signs).reshape(
        *values.shape[:-1],
        len(left),
        len(right),
    )
    # The result is left transposed: its order is as good as any.
    transposed = (table @ right).transpose(-1, -2)
    return torch.matmul(transposed, left.T).flatten(-2)


def factors(channels: int) -> tuple[Tensor, Tensor]:
    """Return orthogonal float64 matrices [a, a] and [b, b] with a * b = `channels`, close in
    size, for `rotated`.

    The second is Sylvester's Hadamard matrix. The first is one times `odd_factor`, for channels
    that are no power of two.
    """
    odd = channels
    while odd % 2 == 0:
        odd //= 2
    kernel = odd_factor(odd, channels // odd)
    powers = channels // len(kernel)
    left = 1
    while left < powers and len(kernel) * left * left < powers:
        left *= 2
    return torch.kron(_sylvester(left), kernel), _sylvester(powers // left)


def odd_factor(
    odd: int,
    powers: int,
) -> Tensor:
    """Return an orthogonal float64 matrix [odd * 2^j, odd * 2^j], 2^j a divisor of `powers`.

    If odd * 2^j - 1 is a prime that is 3 modulo 4, it is Paley's Hadamard matrix (Paley 1933),
    whose entries are all of one size. Otherwise it is the discrete Hartley transform of order
    `odd`, whose entries are at most sqrt(2 / odd).

    >>> [len(odd_factor(*sizes)) for sizes in ((3, 512), (5, 4), (43, 256), (1, 64))]
    [12, 20, 43, 1]
    """
    order = 4 * odd
    while odd > 1 and order <= min(odd * powers, _LARGEST_ORDER):
        if _is_prime(order - 1):
            return _paley(order)
        order *= 2
    indices = torch.arange(odd)
    angles = (torch.outer(indices, indices) % odd).double() * (2 * math.pi / odd)
    return (angles.cos() + angles.sin()) / math.sqrt(odd)


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _paley(order: int) -> Tensor:
    """Return I + S, where the skew S has the quadratic residues modulo the prime order - 1,
    scaled to be orthogonal.
    """
    prime = order - 1
    character = -torch.ones(prime, dtype=torch.float64)
    character[torch.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    numbers = torch.arange(prime)
    residues = character[(numbers[:, None] - numbers) % prime]
    matrix = torch.ones(
        order,
        order,
        dtype=torch.float64,
    )
    matrix[1:, 0] = -1
    matrix[1:, 1:] = residues + torch.eye(prime, dtype=torch.float64)
    return matrix / math.sqrt(order)


def _sylvester(order: int) -> Tensor:
    """Return the Hadamard matrix of a power of two, scaled to be orthogonal."""
    matrix = torch.ones(
        1,
        1,
        dtype=torch.float64,
    )
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(doubling, matrix)
    return matrix / math.sqrt(order)
