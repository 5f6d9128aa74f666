"""A small residual network that reads 8x8 digits: the example that `make run` calibrates and
tests.

    quantizer --quant_mode calib --config_file configs/example.json --model examples/digits.py
    quantizer --quant_mode test --config_file configs/example.json --model examples/digits.py

The data are the 1797 digits of Alpaydin and Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, 1998 (CC BY 4.0): 1297 to train and calibrate on, 500
held out. `train_digits.py` wrote both files beside this one, the weights and the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from resnet import ResNet
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_suffix(".safetensors")
DATA = WEIGHTS.with_name("digits_data.safetensors")
WHITE = 16
"""The largest value of a pixel in DATA."""
TRAINING_IMAGES = 1297
Batch = tuple[Tensor, Tensor]


def architecture() -> ResNet:
    """The untrained network: 78 thousand parameters, three stages."""
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
    return ResNet(
        widths=(16, 32, 64), blocks=1, num_classes=10, stem=stem, maxpool=nn.Identity()
    )


def digits() -> Batch:
    """Return all images [1797, 1, 8, 8] in 0…1 and their labels [1797], shuffled once."""
    stored = load_file(DATA)
    return stored["images"].float() / WHITE, stored["labels"].long()


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
