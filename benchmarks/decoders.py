"""Three small networks with random weights that make a value for each place: a U-Net, a vocoder
and a tagger.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import images, settle

LEAK = 0.1
"""The slope of HiFi-GAN's activations below 0."""


class Pair(nn.Module):
    """Two 3x3 convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, H, W] to [N, outputs, H, W]."""
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)))


class UNet(nn.Module):
    """Three levels down, and up by transposed convolutions (arXiv 1505.04597)."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        w = width
        self.down = nn.ModuleList([Pair(3, w), Pair(w, 2 * w), Pair(2 * w, 4 * w)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = Pair(4 * w, 8 * w)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (4 * w, 2 * w, w))
        self.joined = nn.ModuleList(Pair(2 * n, n) for n in (4 * w, 2 * w, w))
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] to [N, classes, H, W]."""
        skipped: list[Tensor] = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), skipped.pop()], 1))
        logits: Tensor = self.head(x)
        return logits


class Dilated(nn.Module):
    """Residual convolutions with growing dilation."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.dilated = nn.ModuleList()
        self.plain = nn.ModuleList()
        for dilation in (1, 3):
            padding = dilation * (kernel - 1) // 2
            self.dilated.append(
                nn.Conv1d(channels, channels, kernel, padding=padding, dilation=dilation)
            )
            self.plain.append(nn.Conv1d(channels, channels, kernel, padding=kernel // 2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, T] to the same."""
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            y = dilated(F.leaky_relu(x, LEAK))
            x = x + plain(F.leaky_relu(y, LEAK))
        return x


class Blocks(nn.Module):
    """The mean of two residual blocks of other widths."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.wide = Dilated(channels, 3), Dilated(channels, 7)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, T] to the same."""
        mean: Tensor = (self.narrow(x) + self.wide(x)) / 2
        return mean


class HifiGan(nn.Module):
    """A generator of sound from a spectrogram (arXiv 2010.05646)."""

    def __init__(self, bands: int = 40, width: int = 64) -> None:
        super().__init__()
        self.pre = nn.Conv1d(bands, width, 7, padding=3)
        self.up = nn.ModuleList()
        self.blocks = nn.ModuleList()
        for rate in (8, 4):
            width //= 2
            self.up.append(nn.ConvTranspose1d(2 * width, width, 2 * rate, rate, rate // 2))
            self.blocks.append(Blocks(width))
        self.post = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        """Spectrograms [N, bands, T] to sound [N, 1, 32 T] in -1…1."""
        x = self.pre(x)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(F.leaky_relu(x, LEAK))
            x = blocks(x)
        sound: Tensor = self.post(F.leaky_relu(x, LEAK)).tanh()
        return sound


class WordTagger(nn.Module):
    """A tag for each word, by an LSTM in both directions."""

    def __init__(self, words: int = 500, width: int = 64, tags: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, words: Tensor) -> Tensor:
        """Words [N, T] to logits [N, T, tags]."""
        states, _ = self.lstm(self.words(words))
        logits: Tensor = self.head(states)
        return logits


def unet(seed: int = 0) -> nn.Module:
    """The U-Net for images of 64 pixels, in eval mode."""
    torch.manual_seed(seed)
    model = UNet()
    settle(model, images(20, 10, 64, seed=99))
    return model


@torch.no_grad()
def hifi_gan(seed: int = 0) -> nn.Module:
    """The vocoder, in eval mode; its sound is seldom as loud as the tanh allows."""
    torch.manual_seed(seed)
    model = HifiGan()
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            products = module.in_channels * module.kernel_size[0]
            if isinstance(module, nn.ConvTranspose1d):
                products //= module.stride[0]
            nn.init.normal_(module.weight, 0, products**-0.5)
    model.post.weight.mul_(0.3)
    return model.eval()


def spectrograms(count: int = 20, batch: int = 4, seed: int = 1) -> list[Tensor]:
    """`count` pieces of noise that changes slowly along time and bands, as [batch, 40, 32]."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 1, 44, 36, generator=generator)
    smooth = F.avg_pool2d(noise, 5, 1) * 5
    return list(torch.split(smooth[:, 0], batch))


def tagger(seed: int = 0) -> nn.Module:
    """The tagger, in eval mode."""
    torch.manual_seed(seed)
    model = WordTagger().eval()
    nn.init.normal_(model.head.weight)
    return model
