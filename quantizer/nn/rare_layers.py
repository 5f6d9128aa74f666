"""Layers that few networks have.

Those that the DPU approximates are in float here: exact with power-of-two scales, without
overflow. Those that algorithms insert (factors of channels, or a rotation) are exact in float,
and not quantized.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.nn.layer import Layer
from quantizer.numerics.blocks import along_axis
from quantizer.numerics.integer import HARDSWISH_POSITION, SIXTH
from quantizer.numerics.rounding import round_half_up

_LARGEST_ORDER = 512


class DpuAvgPool2d(Layer):
    """An average pooling that multiplies sums of windows with `multiplier` / 2^`shift`.

    Without `keepdim` the window is the whole image, and the result is [b, channels].
    """

    def __init__(
        self,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        multiplier: int,
        *,
        shift: int,
        keepdim: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size = list(kernel_size)
        self.stride = list(stride)
        self.padding = list(padding)
        self.multiplier = multiplier
        self.shift = shift
        self.keepdim = keepdim

    def forward(
        self,
        input: Tensor,  # noqa: A002
    ) -> Any:
        """Return the means of the windows, [N, C, H, W], or [N, C] without `keepdim`."""
        sums = self.sums(self.quantize_input(input))
        means = sums * (self.multiplier * 2.0**-self.shift)
        if not self.keepdim:
            means = means.flatten(1)
        return self.quantize_output(means)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum of each window, padding counted as zeros."""
        # ONNX has no average pooling with a divisor of one's own
        if torch.compiler.is_exporting():
            ones = torch.ones(x.shape[1], 1, *self.kernel_size, dtype=x.dtype, device=x.device)
            return F.conv2d(x, ones, None, self.stride, self.padding, groups=x.shape[1])
        return F.avg_pool2d(x, self.kernel_size, self.stride, self.padding, divisor_override=1)

    def extra_repr(self) -> str:
        """Return the settings that `print` shows."""
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"factor={self.multiplier}/2^{self.shift}"
        )


class DpuHardsigmoid(Layer):
    """A hardsigmoid that computes relu6(x + 3) * 2731 / 2^14."""

    def forward(
        self,
        input: Tensor,  # noqa: A002
    ) -> Any:
        """Return the hardsigmoid of each value."""
        return self.quantize_output(_hardsigmoid(self.quantize_input(input)))


class DpuHardswish(Layer):
    """A hardswish that multiplies x with its hardsigmoid in 8 bits at position 7, rounded
    half_up.
    """

    def forward(
        self,
        input: Tensor,  # noqa: A002
    ) -> Any:
        """Return each value times its rounded hardsigmoid."""
        x = self.quantize_input(input)
        steps = 2.0**HARDSWISH_POSITION
        codes = round_half_up(_hardsigmoid(x).mul_(steps)).clamp_(max=steps - 1)
        gate = codes.mul_(1 / steps)
        return self.quantize_output(gate.mul_(x))


def _hardsigmoid(x: Tensor) -> Tensor:
    multiplier, shift = SIXTH
    return (x + 3).clamp_(0, 6).mul_(multiplier * 2.0**-shift)


class InputScale(Layer):
    """A layer that computes x * weight along `axis`: it divides the channels by the
    factors of the weights after it.
    """

    def __init__(self, channels: int, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)

    def forward(
        self,
        input: Tensor,  # noqa: A002
    ) -> Any:
        """Return the scaled input."""
        weight = along_axis(self.weight.to(input.dtype), input, self.axis)
        return self.quantize_output(input * weight)

    def extra_repr(self) -> str:
        """Return the number of channels and the axis, which `print` shows."""
        return f"{len(self.weight)}, axis={self.axis}"


class InputRotation(Layer):
    """A layer that multiplies the channels of the last axis with an orthogonal matrix. The
    weights after it undo this.

    `weight` holds the signs [channels]. The matrix follows from their number
    (`numerics.hadamard`).
    """

    left: Tensor
    right: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)
        left, right = factors(channels)
        self.register_buffer("left", left.float(), persistent=False)
        self.register_buffer("right", right.float(), persistent=False)

    def forward(
        self,
        input: Tensor,  # noqa: A002
    ) -> Any:
        """Return the input with its channels rotated."""
        signs = self.weight.to(input.dtype)
        left = self.left.to(input.dtype)
        right = self.right.to(input.dtype)
        return self.quantize_output(rotate_rows(input, signs, left, right))

    def extra_repr(self) -> str:
        """Return the number of channels, which `print` shows."""
        return f"{len(self.weight)}"


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
