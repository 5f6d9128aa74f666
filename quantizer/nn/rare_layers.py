"""Layers that few networks have.

Those that the DPU approximates are in float here: exact with power-of-two scales, without
overflow. Those that algorithms insert (factors of channels, or a rotation) are exact in float,
and not quantized.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.nn.layer import Layer
from quantizer.numerics.blocks import along_axis
from quantizer.numerics.hadamard import factors, rotate_rows
from quantizer.numerics.integer import HARDSWISH_POSITION, SIXTH
from quantizer.numerics.rounding import round_half_up


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
