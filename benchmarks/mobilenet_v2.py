"""MobileNetV2 for photos, its parts named as in the weights that packages have (arXiv
1801.04381).
"""

from __future__ import annotations

from torch import Tensor, nn


class InvertedResidual(nn.Module):
    """Widens, filters each channel, and narrows."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        widen = [norm_act(inputs, wide, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *widen,
            norm_act(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)  # type: ignore[no-any-return]


def norm_act(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, batch norm, ReLU6."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class MobileNetV2(nn.Module):
    """For 1000 classes of photos, 3.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        rows = (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        layers: list[nn.Module] = [norm_act(3, 32, 3, 2)]
        inputs = 32
        for expansion, outputs, count, stride in rows:
            for index in range(count):
                own_stride = 1 if index else stride
                layers.append(InvertedResidual(inputs, outputs, own_stride, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, norm_act(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]
