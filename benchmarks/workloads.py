"""The fixed work of every benchmark: ResNet-18 with settled batch statistics, colour noise with photos' spectrum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

COLOUR_MIX = ((0.9, 0.3, 0.1), (0.9, 0.0, -0.2), (0.9, -0.3, 0.1))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.down: nn.Sequential | None = None
        if stride != 1 or inplanes != planes:
            self.down = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        """[N, inplanes, H, W] to [N, planes, H/stride, W/stride]."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + (x if self.down is None else self.down(x)))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """Four stages of two blocks, for 224x224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks, inplanes = [], 64
        for planes, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inplanes, planes, stride), BasicBlock(planes, planes)]
            inplanes = planes
        self.layers = nn.Sequential(*blocks)
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.Flatten()
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] to logits [N, classes]."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.flat(self.avg(self.layers(x))))  # type: ignore[no-any-return]


def images(count: int = 100, batch: int = 10, size: int = 224, seed: int = 1) -> list[Tensor]:
    """`count` images of 1/f noise, of about unit variance and correlated channels, as [batch, 3, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)[None]
    amplitude = 1 / (rows**2 + columns**2).sqrt().clamp_min(1 / size)
    white = torch.randn(count, 3, size, size, generator=generator)
    x = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(size, size))
    x = x / x.std(dim=(1, 2, 3), keepdim=True)
    x = torch.einsum("oc,nchw->nohw", torch.tensor(COLOUR_MIX), x)
    brightness = 0.1 * torch.randn(count, 1, 1, 1, generator=generator)
    x = (x / x.std() + brightness).clamp_(-2.6, 2.6)
    return list(torch.split(x.contiguous(), batch))


def resnet18(seed: int = 0) -> ResNet18:
    """The model in eval mode: random weights of the usual scale, batch statistics averaged over 20 images."""
    torch.manual_seed(seed)
    model = ResNet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.4, 1.2)
            nn.init.normal_(module.bias, 0, 0.15)
            module.momentum = None  # a plain average over the batches
    model.train()
    with torch.no_grad():
        for batch in images(20, 10, seed=99):
            model(batch)
    return model.eval()
