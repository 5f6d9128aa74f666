"""Layers that algorithms insert: factors of channels, or a rotation. Exact in float; nothing of
them is quantized.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.layer import Layer
from quantizer.numerics.hadamard import factors, rotated


class InputScale(Layer):
    """x * weight along `axis`: the channels divided by what the weights that read them were
    multiplied with.
    """

    def __init__(self, channels: int, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch.nn names it
        shape = [1] * input.dim()
        shape[self.axis] = -1
        return self.finish(input * self.weight.to(input.dtype).view(shape))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, axis={self.axis}"


class InputRotation(Layer):
    """The channels of the last axis times an orthogonal matrix, which the weights that read
    them undo.

    `weight` holds the signs [channels]; the matrix follows from their number
    (`numerics.hadamard`).
    """

    left: Tensor
    right: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels), requires_grad=False)
        for name, factor in zip(("left", "right"), factors(channels), strict=True):
            self.register_buffer(name, factor.float(), persistent=False)

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch.nn names it
        signs, left, right = (
            tensor.to(input.dtype) for tensor in (self.weight, self.left, self.right)
        )
        return self.finish(rotated(input, signs, left, right))

    def extra_repr(self) -> str:
        return f"{len(self.weight)}"
