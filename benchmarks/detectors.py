"""Two small detectors with random weights: a pyramid with three scales, and one with boxes and
classes at each stage of a backbone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from workloads import images, settle

CLASSES = 20
SIDE = 128
"""Of images, in pixels."""


class Unit(nn.Module):
    """A convolution, a batch norm and an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        activation: type[nn.Module] = nn.SiLU,
    ) -> None:
        super().__init__()
        padding = kernel // 2
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H/stride, W/stride]."""
        y: Tensor = self.act(self.norm(self.conv(x)))
        return y


class CrossStage(nn.Module):
    """Half of the channels pass a residual block, and all are joined (arXiv 1911.11929)."""

    def __init__(self, inputs: int, outputs: int, *, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.left, self.right = Unit(inputs, half), Unit(inputs, half)
        self.first, self.second = Unit(half, half), Unit(half, half, 3)
        self.join = Unit(outputs, outputs)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H, W]."""
        left = self.left(x)
        block = self.second(self.first(left))
        if self.shortcut:
            block = left + block
        joined: Tensor = self.join(torch.cat([block, self.right(x)], 1))
        return joined


class Pyramid(nn.Module):
    """Max pools of three sizes, joined (arXiv 1406.4729)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = Unit(channels, channels // 2)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.join = Unit(channels * 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] to the same."""
        x = self.reduce(x)
        once = self.pool(x)
        twice = self.pool(once)
        pooled = torch.cat([x, once, twice, self.pool(twice)], 1)
        joined: Tensor = self.join(pooled)
        return joined


class Yolo(nn.Module):
    """Boxes and scores of three scales (arXiv 1804.02767), which two paths through a pyramid
    connect (arXiv 1803.01534).
    """

    anchors: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(Unit(3, w, 3, 2), Unit(w, 2 * w, 3, 2))
        self.small = nn.Sequential(
            CrossStage(2 * w, 2 * w), Unit(2 * w, 4 * w, 3, 2), CrossStage(4 * w, 4 * w)
        )
        self.middle = nn.Sequential(Unit(4 * w, 8 * w, 3, 2), CrossStage(8 * w, 8 * w))
        self.large = nn.Sequential(Unit(8 * w, 8 * w, 3, 2), Pyramid(8 * w))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.top_middle = CrossStage(16 * w, 4 * w, shortcut=False)
        self.top_small = CrossStage(8 * w, 4 * w, shortcut=False)
        self.down_small = Unit(4 * w, 4 * w, 3, 2)
        self.bottom_middle = CrossStage(8 * w, 8 * w, shortcut=False)
        self.heads = nn.ModuleList(
            nn.Conv2d(channels, 3 * (5 + CLASSES), 1) for channels in (4 * w, 8 * w, 8 * w)
        )
        sizes = torch.tensor([[10.0, 13.0], [30.0, 61.0], [59.0, 119.0]])
        self.register_buffer("anchors", sizes.view(1, 3, 2, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Images [N, 3, H, W] to boxes [N, M, 4] in pixels and scores [N, M, CLASSES + 1]."""
        small = self.small(self.stem(x))
        middle = self.middle(small)
        large = self.large(middle)
        middle = self.top_middle(torch.cat([self.up(large), middle], 1))
        small = self.top_small(torch.cat([self.up(middle), small], 1))
        middle = self.bottom_middle(torch.cat([self.down_small(small), middle], 1))
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        for stride, features, head in zip(
            (8, 16, 32), (small, middle, large), self.heads, strict=True
        ):
            values = head(features).unflatten(1, (3, 5 + CLASSES)).sigmoid()
            boxes.append(self._boxes(values[:, :, :4], stride))
            scores.append(values[:, :, 4:].flatten(3).transpose(2, 3).flatten(1, 2))
        return {"boxes": torch.cat(boxes, 1), "scores": torch.cat(scores, 1)}

    def _boxes(self, values: Tensor, stride: int) -> Tensor:
        """Return centres and sizes in pixels of [N, 3, 4, H, W] in 0…1."""
        height, width = values.shape[-2:]
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        grid = torch.stack([columns, rows]).float()
        centres = (values[:, :, :2] * 2 - 0.5 + grid) * stride
        sizes = (values[:, :, 2:] * 2).square() * self.anchors
        both = torch.cat([centres, sizes], 2)
        return both.flatten(3).transpose(2, 3).flatten(1, 2)


class Separable(nn.Module):
    """A depthwise convolution and one across channels (arXiv 1704.04861)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.depth = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.norm = nn.BatchNorm2d(inputs)
        self.act = nn.ReLU6()
        self.point = Unit(inputs, outputs, activation=nn.ReLU6)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H/stride, W/stride]."""
        y: Tensor = self.point(self.act(self.norm(self.depth(x))))
        return y


class Ssd(nn.Module):
    """Boxes and classes at each of four stages (arXiv 1512.02325)."""

    def __init__(self, width: int = 16, boxes: int = 4) -> None:
        super().__init__()
        w = width
        stem = Unit(3, w, 3, 2, activation=nn.ReLU6)
        self.stages = nn.ModuleList(
            [
                nn.Sequential(stem, Separable(w, 2 * w, 2), Separable(2 * w, 4 * w, 2)),
                nn.Sequential(Separable(4 * w, 4 * w), Separable(4 * w, 8 * w, 2)),
                nn.Sequential(Unit(8 * w, 4 * w), Separable(4 * w, 8 * w, 2)),
                nn.Sequential(Unit(8 * w, 4 * w), Separable(4 * w, 8 * w, 2)),
            ]
        )
        widths = (4 * w, 8 * w, 8 * w, 8 * w)
        self.boxes = nn.ModuleList(nn.Conv2d(n, boxes * 4, 3, padding=1) for n in widths)
        self.classes = nn.ModuleList(
            nn.Conv2d(n, boxes * (CLASSES + 1), 3, padding=1) for n in widths
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images [N, 3, H, W] to boxes [N, M, 4] and class shares [N, M, CLASSES + 1]."""
        boxes: list[Tensor] = []
        classes: list[Tensor] = []
        for stage, box, kind in zip(self.stages, self.boxes, self.classes, strict=True):
            x = stage(x)
            boxes.append(box(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
            classes.append(kind(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, CLASSES + 1))
        return torch.cat(boxes, 1), torch.cat(classes, 1).softmax(-1)


def yolo(seed: int = 0) -> nn.Module:
    """The pyramid, in eval mode."""
    torch.manual_seed(seed)
    return settled_heads(Yolo())


def ssd(seed: int = 0) -> nn.Module:
    """The detector with heads at stages, in eval mode."""
    torch.manual_seed(seed)
    return settled_heads(Ssd())


def settled_heads(model: nn.Module) -> nn.Module:
    """Return the model with drawn weights; those of heads give values of about one."""
    settle(model, images(20, 10, SIDE, seed=99))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="linear")
            nn.init.normal_(module.bias, 0, 0.5)
    return model
