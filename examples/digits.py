"""A small residual network that reads 8x8 digits: the example that `make run` calibrates and
tests.

    quantizer --quant_mode calib --config_file configs/example.json --model examples/digits.py
    quantizer --quant_mode test --config_file configs/example.json --model examples/digits.py

The data are the 1797 digits that scikit-learn ships (Alpaydin and Kaynak 1998, UCI): 1297 to
train and calibrate on, 500 held out. The weights next to this file come from `train_digits.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from resnet import ResNet
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_suffix(".safetensors")
TRAINING_IMAGES = 1297
Batch = tuple[Tensor, Tensor]


def architecture() -> ResNet:
    """The untrained network: 78 thousand parameters, three stages."""
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
    return ResNet(
        widths=(16, 32, 64), blocks=1, num_classes=10, stem=stem, maxpool=nn.Identity()
    )


def digits() -> Batch:
    """All images [1797, 1, 8, 8] in 0…1 and their labels [1797], in one fixed shuffled
    order.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels)[order]


def model() -> ResNet:
    """The trained network."""
    network = architecture()
    network.load_state_dict(load_file(WEIGHTS))
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


def evaluate(model: Callable[[Tensor], Tensor], data: Iterable[Batch]) -> dict[str, float]:
    """Top-1 accuracy, from 0 to 1."""
    right = total = 0
    for images, labels in data:
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    return {"top1": right / total}
