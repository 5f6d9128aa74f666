"""ResNet (He et al. 2015), RegNet (Radosavovic et al. 2020), DenseNet (Huang et al. 2016)."""

from __future__ import annotations

from itertools import pairwise

import torch
from harness import Case, architecture, images, prepared
from torch import Tensor, nn


def conv_norm(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3 in groups, 1x1, and a shortcut."""

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.reduce = conv_norm(inputs, width, 1)
        self.conv = conv_norm(width, width, 3, stride, groups)
        self.expand = conv_norm(width, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.relu(self.conv(self.relu(self.reduce(x)))))
        return self.relu(y + self.shortcut(x))


class Staged(nn.Module):
    """A stem, stages of bottlenecks, a linear head."""

    def __init__(self, groups: int, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_norm(3, 16, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        sizes = (16, *(4 * width for width in widths))
        blocks = [
            Bottleneck(a, b // 4, b, 1 if a == 16 else 2, groups) for a, b in pairwise(sizes)
        ]
        self.stages = nn.Sequential(
            *blocks, Bottleneck(sizes[-1], widths[-1], sizes[-1], 1, groups)
        )
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


@architecture
def resnet() -> Case:
    return Case(prepared(Staged(1)), images(4, 3, 32, 32))


@architecture
def regnet() -> Case:
    return Case(prepared(Staged(4)), images(4, 3, 32, 32))


class DenseLayer(nn.Module):
    """Norm and ReLU come before the convolution, whose output is concatenated to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
        )
        self.norm2, self.conv2 = (
            nn.BatchNorm2d(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(torch.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(torch.relu(self.norm2(y)))], 1)


@architecture
def densenet() -> Case:
    stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
    block = [DenseLayer(16 + 8 * i, 8) for i in range(3)]
    transition = [
        nn.BatchNorm2d(40),
        nn.ReLU(),
        nn.Conv2d(40, 20, 1, bias=False),
        nn.AvgPool2d(2),
    ]
    more = [DenseLayer(20 + 8 * i, 8) for i in range(2)]
    head = [
        nn.BatchNorm2d(36),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(36, 10),
    ]
    return Case(
        prepared(nn.Sequential(stem, *block, *transition, *more, *head)), images(4, 3, 32, 32)
    )
