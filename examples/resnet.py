"""Residual networks in torchvision's naming (conv1, bn1, layer1.0.conv1, …, fc), so that its
public weights fit.

Shared by the digits and the ImageNet example; knows nothing of quantization.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, "Deep Residual Learning", figure 5
    left).
    """

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, inplanes, H, W] to [N, planes, H/stride, W/stride]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem, one stage of `BasicBlock`s per width, average pooling and a classifier."""

    def __init__(
        self,
        widths: Sequence[int],
        blocks: int,
        num_classes: int,
        stem: nn.Conv2d,
        maxpool: nn.Module,
    ) -> None:
        super().__init__()
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(stem.out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = maxpool
        inplanes = stem.out_channels
        for stage, planes in enumerate(widths, start=1):
            layers = [BasicBlock(inplanes, planes, stride=1 if stage == 1 else 2)]
            layers += [BasicBlock(planes, planes) for _ in range(blocks - 1)]
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
            inplanes = planes
        self.stages = len(widths)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inplanes, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, C, H, W] to logits [N, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]
