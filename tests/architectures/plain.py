"""AlexNet, VGG, SqueezeNet, Inception, ConvNeXt."""

from __future__ import annotations

import torch
from harness import Case, architecture, images, prepared
from residual import conv_norm
from torch import Tensor, nn


@architecture
def alexnet() -> Case:
    features = (
        nn.Conv2d(3, 16, 5, 2, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
    )
    head = (
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(288, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    return Case(prepared(nn.Sequential(*features, *head)), images(4, 3, 32, 32))


@architecture
def vgg() -> Case:
    widths = ((3, 8), (8, 8), (8, 16), (16, 16))
    stages = [
        m
        for i, o in widths
        for m in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(True))
    ]
    stages.insert(6, nn.MaxPool2d(2))
    head = (
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 32),
        nn.ReLU(True),
        nn.Linear(32, 10),
    )
    return Case(prepared(nn.Sequential(*stages, *head)), images(4, 3, 32, 32))


class Fire(nn.Module):
    """Squeeze, then expand by 1x1 and 3x3 side by side (Iandola et al. 2016)."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.small, self.large = (
            nn.Conv2d(squeeze, expand, 1),
            nn.Conv2d(squeeze, expand, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.small(x)), torch.relu(self.large(x))], 1)


@architecture
def squeezenet() -> Case:
    body = (
        nn.Conv2d(3, 16, 3, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Fire(16, 4, 16),
        Fire(32, 8, 16),
    )
    head = (nn.Conv2d(32, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Case(prepared(nn.Sequential(*body, *head)), images(4, 3, 32, 32))


class Inception(nn.Module):
    """Four branches, factored kernels, average pooling (Szegedy et al. 2015)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one = self.unit(inputs, 8, 1)
        self.factored = nn.Sequential(self.unit(inputs, 8, (1, 7)), self.unit(8, 8, (7, 1)))
        self.twice = nn.Sequential(self.unit(inputs, 8, 3), self.unit(8, 8, 3))
        self.pooled = nn.Sequential(
            nn.AvgPool2d(3, 1, 1, count_include_pad=False), self.unit(inputs, 8, 1)
        )

    @staticmethod
    def unit(inputs: int, outputs: int, kernel: int | tuple[int, int]) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, kernel, padding="same", bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.factored(x), self.twice(x), self.pooled(x)], 1)


@architecture
def inception() -> Case:
    body = (conv_norm(3, 16, 3, 2), nn.ReLU(), Inception(16), nn.MaxPool2d(3, 2), Inception(32))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Case(prepared(nn.Sequential(*body, *head)), images(4, 3, 32, 32))


class ConvNeXtBlock(nn.Module):
    """A large depthwise kernel, a norm over channels, two linear layers, a learned scale (Liu
    et al. 2022).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.filter(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


@architecture
def convnext() -> Case:
    body = (
        nn.Conv2d(3, 16, 4, 4),
        ConvNeXtBlock(16),
        nn.Conv2d(16, 24, 2, 2),
        ConvNeXtBlock(24),
    )
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(24), nn.Linear(24, 10))
    return Case(prepared(nn.Sequential(*body, *head)), images(4, 3, 32, 32))
