"""Trains the network of `digits.py` or `digits_mobile.py` and saves its weights, in ten seconds or two minutes.

python examples/train_digits.py [mobile]
"""

from __future__ import annotations

import sys

import digits
import digits_mobile
import torch
from digits import TRAINING_IMAGES, evaluate
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

EPOCHS = 40
BATCH_SIZE = 64
STEPS = TRAINING_IMAGES // BATCH_SIZE


def shifted(images: Tensor) -> Tensor:
    """Each image [1, side, side] moved by up to one pixel each way: the augmentation."""
    side = images.shape[-1]
    padded = F.pad(images, (1, 1, 1, 1))
    rows, columns = torch.randint(0, 3, (2, len(images))).tolist()
    return torch.stack([p[:, r : r + side, c : c + side] for p, r, c in zip(padded, rows, columns, strict=True)])


def main() -> None:
    """Train from seed 0, print the held-out accuracy, save."""
    example = digits_mobile if sys.argv[1:] == ["mobile"] else digits
    torch.manual_seed(0)
    network = example.architecture()
    images, labels = (part[:TRAINING_IMAGES] for part in example.digits())
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=EPOCHS * STEPS)
    for epoch in range(1, EPOCHS + 1):
        for chosen in torch.randperm(TRAINING_IMAGES)[: STEPS * BATCH_SIZE].reshape(STEPS, BATCH_SIZE):
            loss = F.cross_entropy(network(shifted(images[chosen])), labels[chosen], label_smoothing=0.05)
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
    main()
