"""Small networks with random weights: hard-swish and squeeze-excite, attention over patches,
plain convolutions with any activation function, blocks with a LayerNorm, and a pyramid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class SqueezeExcite(nn.Module):
    """Channels weighted by what is in all of the image (arXiv 1709.01507)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.act, self.gate = nn.AdaptiveAvgPool2d(1), nn.ReLU(), nn.Hardsigmoid()
        self.down, self.up = (
            nn.Conv2d(channels, channels // 4, 1),
            nn.Conv2d(channels // 4, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        return x * self.gate(self.up(self.act(self.down(self.pool(x)))))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """A block of MobileNetV3 (arXiv 1905.02244)."""

    def __init__(self, inputs: int, wide: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()),
            *(
                nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False),
                nn.BatchNorm2d(wide),
                nn.Hardswish(),
            ),
            *(
                SqueezeExcite(wide),
                nn.Conv2d(wide, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            ),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H/stride, W/stride]."""
        return x + self.body(x) if self.shortcut else self.body(x)  # type: ignore[no-any-return]


def mobile(seed: int = 0) -> nn.Module:
    """A network like MobileNetV3 for 224x224 images, in eval mode."""
    torch.manual_seed(seed)
    rows = (
        (16, 64, 24, 2),
        (24, 96, 24, 1),
        (24, 120, 40, 2),
        (40, 240, 40, 1),
        (40, 240, 80, 2),
        (80, 480, 80, 1),
    )
    blocks = [Inverted(*row) for row in rows]
    stem = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
    )
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(80, 512),
        nn.Hardswish(),
        nn.Linear(512, 100),
    )
    return nn.Sequential(stem, *blocks, head).eval()


@torch.no_grad()
def normalized(network: nn.Module, x: Tensor) -> nn.Module:
    """Return a network whose batch norms have the statistics of its activations for `x`.

    Otherwise activations vanish layer by layer, and reach no end of a hard-swish.
    """
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            # The statistics of the last batch
            module.momentum = 1.0
    network.train()(x)
    return network.eval()


class Encoder(nn.Module):
    """A block of a vision transformer (arXiv 2010.11929)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] to the same."""
        q, k, v = (
            self.qkv(self.norm1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.proj((scores @ v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Patches of 16, four blocks."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(torch.randn(1, 196, width) * 0.02)
        self.blocks = nn.Sequential(*(Encoder(width, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 224, 224] to [N, 100]."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]


def vit(seed: int = 0) -> nn.Module:
    """A small vision transformer, in eval mode."""
    torch.manual_seed(seed)
    return Vit().eval()


def convolutions(activation: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Six convolutions for 64x64 images, each with a batch norm and an activation function."""
    torch.manual_seed(seed)
    widths = (3, 32, 64, 64, 128, 128, 256)
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        conv = nn.Conv2d(inputs, outputs, 3, stride=1 + index % 2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), activation()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).eval()


class Mixed(nn.Module):
    """A block of ConvNeXt (arXiv 2201.03545)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, width, H, W] to the same."""
        rows = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.mlp(rows).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def convnext(seed: int = 0) -> nn.Module:
    """Patches of 4 of 64x64 images, and four blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 96, 4, 4),
        *(Mixed(96) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    ).eval()


class Pyramid(nn.Module):
    """Features of three sizes, each added to the next finer ones (arXiv 1612.03144)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1),
                nn.ReLU(),
            )
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(inputs, width, 1) for inputs in widths[1:])
        self.smooth = nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, width, H/2, W/2]."""
        maps: list[Tensor] = []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            maps.append(lateral(x))
        top = maps.pop()
        while maps:
            top = maps.pop() + nn.functional.interpolate(top, scale_factor=2.0)
        return self.smooth(top)  # type: ignore[no-any-return]


def pyramid(seed: int = 0) -> nn.Module:
    """The pyramid with random weights, in eval mode."""
    torch.manual_seed(seed)
    return Pyramid().eval()
