"""Layers with a weight: torch's own, plus quantizers. Whoever builds them fills the parameters; nothing is random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.nn.layer import Layer


class _Weighted(Layer):
    """Skips torch's random initialization, quantizes input and output."""

    def reset_parameters(self) -> None:
        """Nothing: the weights come from the model."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Any:  # noqa: A002 - as torch.nn names it
        """torch's layer, between its quantizers; `output_size` is for transposed convolutions."""
        if "input" in self.quantizers:
            input = self.quantizers["input"](input)  # noqa: A001
        output = super().forward(input) if output_size is None else super().forward(input, output_size)
        return self.finish(output)


class Conv1d(_Weighted, nn.Conv1d):
    """torch.nn.Conv1d with quantizers."""


class Conv2d(_Weighted, nn.Conv2d):
    """torch.nn.Conv2d with quantizers."""


class Conv3d(_Weighted, nn.Conv3d):
    """torch.nn.Conv3d with quantizers."""


class ConvTranspose1d(_Weighted, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with quantizers."""


class ConvTranspose2d(_Weighted, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with quantizers."""


class ConvTranspose3d(_Weighted, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with quantizers."""


class Linear(_Weighted, nn.Linear):
    """torch.nn.Linear with quantizers."""


class Embedding(_Weighted, nn.Embedding):
    """torch.nn.Embedding with quantizers."""

    def forward(self, indices: Tensor) -> Any:  # type: ignore[override]  # as torch's function names it
        """The rows of the weight, quantized where the plan says so."""
        return super().forward(indices)


class ChannelScale(Layer):
    """What remains of a batch norm that could not fold: x * weight + bias, for each channel in dimension 1."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(num_features)), nn.Parameter(torch.empty(num_features))

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch.nn names it
        """The scaled channels, quantized where the plan says so."""
        if "input" in self.quantizers:
            input = self.quantizers["input"](input)  # noqa: A001
        shape = [-1] + [1] * (input.dim() - 2)
        return self.finish(input * self.weight.reshape(shape) + self.bias.reshape(shape))
