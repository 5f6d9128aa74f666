"""Trains the network of `digits.py` or `digits_mobile.py` and saves its weights, in ten seconds
or one minute; or writes their data, from the copy that scikit-learn ships.

python examples/train_digits.py [mobile|data]
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import digits
import digits_mobile
import torch
from digits import TRAINING_IMAGES, evaluate
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

BATCH_SIZE = 64
STEPS = TRAINING_IMAGES // BATCH_SIZE


class Recipe(NamedTuple):
    """How a network is trained; `robust` with shifted images, smoothed labels and weight
    decay.
    """

    example: Any
    epochs: int
    rate: float
    robust: bool


RECIPES = {
    "digits": Recipe(digits, 40, 0.01, robust=True),
    # Left as sensitive to the rounding of its weights as large depthwise networks are.
    "mobile": Recipe(digits_mobile, 20, 0.003, robust=False),
}


def shifted(images: Tensor) -> Tensor:
    """Each image [1, 8, 8] moved by up to one pixel each way: the augmentation."""
    padded = F.pad(images, (1, 1, 1, 1))
    rows, columns = torch.randint(0, 3, (2, len(images))).tolist()
    return torch.stack(
        [p[:, r : r + 8, c : c + 8] for p, r, c in zip(padded, rows, columns, strict=True)]
    )


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
    example, epochs, rate, robust = RECIPES[name]
    torch.manual_seed(0)
    network = example.architecture()
    images, labels = (part[:TRAINING_IMAGES] for part in example.digits())
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05 if robust else 0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=epochs * STEPS
    )
    for epoch in range(1, epochs + 1):
        for chosen in torch.randperm(TRAINING_IMAGES)[: STEPS * BATCH_SIZE].reshape(
            STEPS, BATCH_SIZE
        ):
            x = shifted(images[chosen]) if robust else images[chosen]
            loss = F.cross_entropy(
                network(x), labels[chosen], label_smoothing=0.05 if robust else 0.0
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch:2d}: loss {loss.item():.4f}")
    network.eval()
    with torch.no_grad():
        print(f"held-out top-1: {evaluate(network, example.evaluation_data())['top1']:.1%}")
    save_file(network.state_dict(), example.WEIGHTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
