"""Rotate channels by orthogonal matrices whose entries have nearly equal size.

A matrix for n = a * b channels is the Kronecker product of two small factors, [a, a] and
[b, b], and is never built itself.
"""

import math

import torch
from torch import Tensor

_LARGEST_ORDER = 512


def rotate_rows(values: Tensor, signs: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return each row along the last axis times a fixed orthogonal matrix.

    The matrix multiplies by the signs, and then by both factors. That takes n * (a + b)
    products a row. It is faster than the log2(n) passes of additions of a fast Hadamard
    transform.

    Args:
        values: [..., n].
        signs: [n], +1 or -1 for each of the n = a * b channels.
        left, right: [a, a] and [b, b], which are `factors(n)` in the dtype of `values`.

    >>> n = 12
    >>> left, right = factors(n)
    >>> identity = torch.eye(n, dtype=torch.float64)
    >>> matrix = rotate_rows(identity, torch.ones(n, dtype=torch.float64), left, right)
    >>> bool(torch.allclose(matrix @ matrix.T, identity))
    True
    """
    table = (values * signs).reshape(*values.shape[:-1], len(left), len(right))
    # The product stays transposed, because any fixed order of channels is as good
    transposed = (table @ right).transpose(-1, -2)
    return torch.matmul(transposed, left.T).flatten(-2)


def factors(channels: int) -> tuple[Tensor, Tensor]:
    """Return orthogonal float64 matrices [a, a] and [b, b] with a * b = `channels`, close in
    size, for `rotate_rows`.

    The second is Sylvester's Hadamard matrix. The first is the Kronecker product of another
    one and `odd_factor`, which is needed if the number of channels is not a power of two.
    """
    odd = channels
    while odd % 2 == 0:
        odd //= 2
    kernel = odd_factor(odd, channels // odd)
    # The rest is a power of two, which both matrices share so that they are close in size
    power_of_two = channels // len(kernel)
    left = 1
    while left < power_of_two and len(kernel) * left * left < power_of_two:
        left *= 2
    return torch.kron(_sylvester(left), kernel), _sylvester(power_of_two // left)


def odd_factor(odd: int, powers: int) -> Tensor:
    """Return an orthogonal float64 matrix whose order is `odd` times a power of two.

    If some order n = odd * 2^j with j >= 2 has a prime n - 1, it is Paley's Hadamard matrix
    (Paley 1933), whose entries are all of one size. Otherwise it is the discrete Hartley
    transform of order `odd`, whose entries are at most sqrt(2 / odd).

    Args:
        odd: an odd number.
        powers: a power of two. 2^j must divide it.

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
    """Return Paley's Hadamard matrix, scaled to be orthogonal.

    It is I + S, with S skew-symmetric. S has +1 at [i, j] if i - j is a quadratic residue
    modulo the prime order - 1, and -1 otherwise. Around it are a row of 1 and a column of -1.
    """
    prime = order - 1
    # 1 for quadratic residues, -1 for other numbers, and 0 for 0
    character = -torch.ones(prime, dtype=torch.float64)
    character[torch.arange(1, prime) ** 2 % prime] = 1
    character[0] = 0
    numbers = torch.arange(prime)
    residues = character[(numbers[:, None] - numbers) % prime]
    matrix = torch.ones(order, order, dtype=torch.float64)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = residues + torch.eye(prime, dtype=torch.float64)
    return matrix / math.sqrt(order)


def _sylvester(order: int) -> Tensor:
    """Return the Hadamard matrix of a power of two, scaled to be orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(doubling, matrix)
    return matrix / math.sqrt(order)
