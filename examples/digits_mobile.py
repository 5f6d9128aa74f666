"""A depthwise network that reads digits, and the same function with skewed channels, which int8
per tensor destroys.

    quantizer --quant_mode calib --config_file configs/cpu_int8.json \
        --model examples/digits_mobile.py
    quantizer --quant_mode calib --config_file configs/dpu.json \
        --model examples/digits_mobile.py:skewed

`skewed()` scales channel i of every layer by 2^U(-6, 6) and the next layer's input by its
inverse: the float outputs stay the same, but 8 bits with one scale per tensor cannot represent
the weights until `include_cle` balances them (Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", section 3.1, 2019). The weights come from
`train_digits.py mobile`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from digits import digits as small_digits
from digits import evaluate
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["architecture", "calibration_data", "evaluate", "evaluation_data", "model", "skewed"]

WEIGHTS = Path(__file__).with_suffix(".safetensors")
TRAINING_IMAGES = 1297
Batch = tuple[Tensor, Tensor]


class Separable(nn.Sequential):
    """A depthwise 3x3 and a pointwise convolution, each with BatchNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, in_channels, 3, stride, 1, groups=in_channels, bias=False),
            nn.BatchNorm2d(in_channels),
            nn.ReLU(),
            nn.Conv2d(in_channels, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
        )


class MobileNet(nn.Module):
    """The depthwise separable network of Howard et al. 2017, small: four blocks, 10 thousand
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            Separable(16, 32),
            Separable(32, 32, stride=2),
            Separable(32, 64),
            Separable(64, 64, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [b, 10] of images [b, 1, 16, 16]."""
        logits: Tensor = self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))
        return logits


def architecture() -> MobileNet:
    """The untrained network."""
    return MobileNet()


def digits() -> Batch:
    """All images, enlarged to [1797, 1, 16, 16], and their labels."""
    images, labels = small_digits()
    return F.interpolate(images, scale_factor=2.0, mode="bilinear"), labels


def model() -> MobileNet:
    """The trained network."""
    network = architecture()
    network.load_state_dict(load_file(WEIGHTS))
    return network


def skewed(octaves: float = 6.0) -> MobileNet:
    """The trained network with channel i of each convolution scaled by 2^U(-octaves, octaves),
    undone in the next.
    """
    network = model()
    draw = torch.Generator().manual_seed(0)
    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm, after in zip(norms, layers[1:], strict=True):
            factor = 2 ** ((torch.rand(norm.num_features, generator=draw) * 2 - 1) * octaves)
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
            depthwise = isinstance(after, nn.Conv2d) and after.groups > 1
            shape = (-1, 1) if depthwise else (1, -1)
            after.weight.div_(factor.reshape(*shape, *[1] * (after.weight.dim() - 2)))
    return network


def calibration_data() -> list[Batch]:
    """256 training images in batches of 32."""
    images, labels = digits()
    return list(zip(images[:256].chunk(8), labels[:256].chunk(8), strict=True))


def evaluation_data() -> list[Batch]:
    """The 500 held-out images in batches of 100."""
    images, labels = digits()
    return list(
        zip(images[TRAINING_IMAGES:].chunk(5), labels[TRAINING_IMAGES:].chunk(5), strict=True)
    )
