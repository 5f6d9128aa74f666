"""Two small networks with random weights: hard-swish and squeeze-excite, and attention over
patches.
"""

from __future__ import annotations

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
