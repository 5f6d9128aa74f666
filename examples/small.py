"""Networks of a few layers with random weights: what the pages on passes, on the DPU and on the
key-value cache show is seen on them.

quantizer inspect --config_file configs/cpu_int8.json --model examples/small.py quantizer
inspect --to DPU --model examples/small.py:gated
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def model() -> nn.Module:
    """Something for each pass: a batch norm that cannot fold and one that can, ReLU6, dropout,
    SiLU.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Dropout(),
        nn.Conv2d(8, 4, 1),
        nn.SiLU(),
    )


class Gated(nn.Module):
    """A concatenation, a pool, and two operators that a DPU lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 4, 3)
        self.act, self.pool = nn.Hardswish(), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (batch, 4) and a map (batch, 8, 14, 14) of images (batch, 3, 16, 16)."""
        a = self.a(x)
        y = self.head(torch.cat([a, 20 * self.b(x)], dim=1))
        return self.pool(self.act(y) * a.mean()).flatten(1), a


def gated() -> nn.Module:
    """The gated network, the same each time."""
    torch.manual_seed(0)
    return Gated()


class Rows(nn.Module):
    """An attention between the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )
        self.o_proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 48, 16) of images (batch, 3, 16, 16), with two heads."""
        rows = x.flatten(1, 2)
        query, key, value = (
            layer(rows).unflatten(2, (2, 8)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        features: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return features


def attention() -> nn.Module:
    """The attention, the same each time."""
    torch.manual_seed(0)
    return Rows()


def calibration_data() -> list[Tensor]:
    """Four batches of eight random images."""
    return [
        torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        for seed in range(4)
    ]
