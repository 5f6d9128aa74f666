"""MobileNetV2 and V3, EfficientNet, ShuffleNetV2, GhostNet: depthwise convolutions, gates,
channel shuffles.
"""

from __future__ import annotations

import torch
from harness import Case, architecture, images, prepared
from residual import conv_norm
from torch import Tensor, nn
from torch.nn import functional as F


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from all (Hu et al. 2017)."""

    def __init__(self, channels: int, gate: nn.Module) -> None:
        super().__init__()
        self.down, self.up, self.gate = (
            nn.Conv2d(channels, 8, 1),
            nn.Conv2d(8, channels, 1),
            gate,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


class InvertedResidual(nn.Module):
    """Expand, filter each channel, gate, project; a shortcut where shapes allow it (Sandler et
    al. 2018).
    """

    def __init__(
        self, inputs: int, outputs: int, act: nn.Module, stride: int, gate: nn.Module | None
    ) -> None:
        super().__init__()
        width = 4 * inputs
        squeeze = nn.Identity() if gate is None else SqueezeExcite(width, gate)
        self.body = nn.Sequential(
            *(
                conv_norm(inputs, width, 1),
                act,
                conv_norm(width, width, 3, stride, width),
                act,
                squeeze,
            ),
            conv_norm(width, outputs, 1),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def inverted(act: nn.Module, gate: nn.Module | None = None) -> nn.Module:
    """A net of inverted residuals."""
    blocks = [
        InvertedResidual(i, o, act, s, gate)
        for i, o, s in ((8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2))
    ]
    head = (
        conv_norm(16, 64, 1),
        act,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )
    return prepared(nn.Sequential(conv_norm(3, 8, 3, 2), act, *blocks, *head))


@architecture
def mobilenet_v2() -> Case:
    return Case(inverted(nn.ReLU6(inplace=True)), images(4, 3, 32, 32))


@architecture
def mobilenet_v3() -> Case:
    return Case(inverted(nn.Hardswish(inplace=True), nn.Hardsigmoid()), images(4, 3, 32, 32))


@architecture
def efficientnet() -> Case:
    return Case(inverted(nn.SiLU(inplace=True), nn.Sigmoid()), images(4, 3, 32, 32))


class ShuffleBlock(nn.Module):
    """Half of the channels pass, half are convolved, then all are shuffled (Ma et al. 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        first = (conv_norm(half, half, 1), nn.ReLU(), conv_norm(half, half, 3, 1, half))
        self.branch = nn.Sequential(*first, conv_norm(half, half, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        batch, channels, height, width = x.shape
        joined = torch.cat([left, self.branch(right)], 1).view(
            batch, 2, channels // 2, height, width
        )
        return joined.transpose(1, 2).contiguous().view(batch, channels, height, width)


@architecture
def shufflenet_v2() -> Case:
    blocks = (
        ShuffleBlock(16),
        ShuffleBlock(16),
        nn.AvgPool2d(2),
        ShuffleBlock(16),
        nn.ChannelShuffle(4),
    )
    head = (
        conv_norm(16, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return Case(
        prepared(nn.Sequential(conv_norm(3, 16, 3, 2), nn.ReLU(), *blocks, *head)),
        images(4, 3, 32, 32),
    )


class Ghost(nn.Module):
    """Half of the channels are cheap filters of the other half (Han et al. 2019)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.primary = nn.Sequential(conv_norm(inputs, outputs // 2, 1), nn.ReLU())
        self.cheap = nn.Sequential(
            conv_norm(outputs // 2, outputs // 2, 3, 1, outputs // 2), nn.ReLU()
        )
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.primary(x)
        return torch.cat([y, self.cheap(y)], 1)[:, : self.outputs]


@architecture
def ghostnet() -> Case:
    body = (
        conv_norm(3, 8, 3, 2),
        nn.ReLU(),
        Ghost(8, 24),
        SqueezeExcite(24, nn.Hardsigmoid()),
        Ghost(24, 32),
    )
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Case(prepared(nn.Sequential(*body, *head)), images(4, 3, 32, 32))
