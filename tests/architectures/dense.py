"""Segmentation, detection, super-resolution, generation: a value for every pixel. U-Net,
DeepLabV3, FPN, YOLO, ESPCN, an autoencoder, a variational autoencoder's mean path, DCGAN.
"""

from __future__ import annotations

import torch
from harness import Case, architecture, images, prepared
from residual import conv_norm
from torch import Tensor, nn
from torch.nn import functional as F


def unit(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """Convolution, norm, ReLU."""
    return nn.Sequential(conv_norm(inputs, outputs, 3, stride), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down, up by transposed convolutions, skips joined by concatenation (Ronneberger et al.
    2015).
    """

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = unit(3, 8), unit(8, 16), unit(16, 32)
        self.up2, self.join2 = nn.ConvTranspose2d(32, 16, 2, 2), unit(32, 16)
        self.up1, self.join1, self.out = (
            nn.ConvTranspose2d(16, 8, 2, 2),
            unit(16, 8),
            nn.Conv2d(8, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.join2(torch.cat([self.up2(c), b], 1))
        return self.out(self.join1(torch.cat([self.up1(b), a], 1)))


@architecture
def unet() -> Case:
    return Case(prepared(UNet()), images(2, 3, 16, 16))


class DeepLab(nn.Module):
    """Dilated convolutions side by side with a pooled view of the whole, bilinear upsampling
    (Chen et al. 2017).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 16, 2)
        self.branches = nn.ModuleList(
            nn.Conv2d(16, 8, 3, padding=d, dilation=d) for d in (1, 2, 4)
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1), nn.ReLU())
        self.project, self.out = unit(32, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        whole = F.interpolate(
            self.pooled(y), size=y.shape[-2:], mode="bilinear", align_corners=False
        )
        y = self.project(
            torch.cat([*(F.relu(branch(y)) for branch in self.branches), whole], 1)
        )
        return F.interpolate(
            self.out(y), size=x.shape[-2:], mode="bilinear", align_corners=False
        )


@architecture
def deeplab() -> Case:
    return Case(prepared(DeepLab()), images(2, 3, 16, 16))


class FPN(nn.Module):
    """Levels of a backbone, summed from the coarsest down (Lin et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.c2, self.c3, self.c4 = unit(3, 8, 2), unit(8, 16, 2), unit(16, 24, 2)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (8, 16, 24))
        self.smooth = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        c2 = self.c2(x)
        c3 = self.c3(c2)
        p4 = self.lateral[2](self.c4(c3))
        p3 = self.lateral[1](c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        p2 = self.lateral[0](c2) + F.interpolate(p3, scale_factor=2.0, mode="nearest")
        return {
            f"p{i + 2}": layer(p)
            for i, (layer, p) in enumerate(zip(self.smooth, (p2, p3, p4), strict=True))
        }


@architecture
def fpn() -> Case:
    return Case(prepared(FPN()), images(2, 3, 32, 32))


class Yolo(nn.Module):
    """Pixels stacked into channels, pooling at several sizes, boxes decoded on a grid (Redmon
    et al. 2018).
    """

    def __init__(self) -> None:
        super().__init__()
        self.focus, self.neck = unit(12, 16), unit(64, 16, 2)
        self.head = nn.Conv2d(16, 3 * 7, 1)
        self.register_buffer(
            "anchors",
            torch.tensor([[10.0, 13.0], [16.0, 30.0], [33.0, 23.0]]).view(1, 3, 1, 1, 2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        corners = [x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]
        y = F.leaky_relu(self.focus(torch.cat(corners, 1)), 0.1)
        y = self.neck(torch.cat([y, *(F.max_pool2d(y, k, 1, k // 2) for k in (5, 9, 13))], 1))
        batch, _, rows, columns = y.shape
        raw = self.head(y).view(batch, 3, 7, rows, columns).permute(0, 1, 3, 4, 2).contiguous()
        grid = torch.stack(
            torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), 2
        ).float()
        centre = (raw[..., :2].sigmoid() * 2 - 0.5 + grid) * 8
        size = (raw[..., 2:4].sigmoid() * 2) ** 2 * self.anchors
        boxes = torch.cat([centre, size, raw[..., 4:].sigmoid()], -1)
        return boxes.view(batch, -1, 7), raw


@architecture
def yolo() -> Case:
    return Case(prepared(Yolo()), images(2, 3, 32, 32))


@architecture
def espcn() -> Case:
    """Shi et al. 2016: pixels from channels."""
    layers = (
        nn.Conv2d(1, 16, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.Tanh(),
    )
    up = (nn.Conv2d(8, 9, 3, padding=1), nn.PixelShuffle(3))
    return Case(prepared(nn.Sequential(*layers, *up)), images(2, 1, 12, 12))


@architecture
def autoencoder() -> Case:
    down = (
        nn.ReflectionPad2d(1),
        nn.Conv2d(3, 8, 3, 2),
        nn.ELU(),
        nn.Conv2d(8, 4, 3, 2, 1),
        nn.PReLU(4),
    )
    up = (
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.SELU(),
        nn.Upsample(scale_factor=2),
    )
    return Case(
        prepared(nn.Sequential(*down, *up, nn.Conv2d(8, 3, 3, padding=1))), images(2, 3, 16, 16)
    )


class MeanPath(nn.Module):
    """A variational autoencoder as it is used after training: without noise, standard
    deviations returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_var = (
            nn.Linear(64, 32),
            nn.Linear(32, 8),
            nn.Linear(32, 8),
        )
        self.hidden, self.decode = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.encode(x.flatten(1)))
        mean = self.mean(y)
        return torch.sigmoid(self.decode(torch.relu(self.hidden(mean)))), torch.exp(
            0.5 * self.log_var(y)
        )


@architecture
def variational_autoencoder() -> Case:
    return Case(prepared(MeanPath()), images(4, 1, 8, 8))


@architecture
def dcgan() -> Case:
    """The generator of Radford et al. 2015."""
    first = (
        nn.Unflatten(1, (16, 1, 1)),
        nn.ConvTranspose2d(16, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
    )
    more = (nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True))
    last = (nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh())
    noise = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    return Case(
        prepared(nn.Sequential(*first, *more, *last)), tuple((batch,) for batch in noise)
    )
