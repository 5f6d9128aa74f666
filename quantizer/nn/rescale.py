"""Layers that algorithms insert: factors of channels, or a rotation. They are exact in float,
and not quantized.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.layer import Layer
from quantizer.numerics.blocks import along_axis
from quantizer.numerics.hadamard import factors, rotate_rows


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
        return self.finish(input * weight)

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
        return self.finish(rotate_rows(input, signs, left, right))

    def extra_repr(self) -> str:
        """Return the number of channels, which `print` shows."""
        return f"{len(self.weight)}"
