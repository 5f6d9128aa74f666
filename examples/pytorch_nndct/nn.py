"""Marks of the part that is quantized, as scripts for vai_q_pytorch import them."""

from __future__ import annotations

from torch import Tensor, nn


class QuantStub(nn.Module):
    """Marks where the quantized part begins. It returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class DeQuantStub(QuantStub):
    """Marks where the quantized part ends."""
