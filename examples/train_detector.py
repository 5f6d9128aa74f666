"""Trains the network of `detector.py` and saves its weights in half precision, in two
minutes of one core.

python examples/train_detector.py
"""

from __future__ import annotations

import detector
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

EPOCHS = 24
BATCHES = 64
BATCH_SIZE = 64


def targets(truths: list[detector.Truth]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the maps should be: boxes, scores, and the cells that have a box."""
    cells = detector.SIDE // detector.CELL
    boxes = torch.zeros(len(truths), 4, cells, cells)
    scores = torch.zeros(len(truths), detector.CLASSES, cells, cells)
    for index, (corners, classes) in enumerate(truths):
        middles = (corners[:, :2] + corners[:, 2:]) / 2 / detector.CELL
        sizes = (corners[:, 2:] - corners[:, :2]) / detector.CELL
        for middle, size, label in zip(middles, sizes, classes, strict=True):
            column, row = middle.long().tolist()
            boxes[index, :, row, column] = torch.cat([middle - middle.floor(), size.log()])
            scores[index, label, row, column] = 1
    return boxes, scores, scores.amax(1, keepdim=True)


def loss(maps: dict[str, Tensor], truths: list[detector.Truth]) -> Tensor:
    """Return the error of the scores, and that of the boxes in cells that have one."""
    boxes, scores, cells = targets(truths)
    found = torch.cat([maps["boxes"][:, :2].sigmoid(), maps["boxes"][:, 2:]], dim=1)
    of_boxes = ((found - boxes).abs() * cells).sum() / cells.sum()
    of_scores = F.binary_cross_entropy_with_logits(maps["scores"], scores, reduction="sum")
    return of_scores / cells.sum() + 2 * of_boxes


def main() -> None:
    """Train from seed 0, print the held-out precision, and save."""
    torch.manual_seed(0)
    network = detector.Detector()
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.005, total_steps=EPOCHS * BATCHES
    )
    for epoch in range(EPOCHS):
        for images, truths in detector.pictures(
            BATCHES, BATCH_SIZE, held_out=False, seed=100 + epoch
        ):
            value = loss(network(images), truths)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1:2d}: loss {value.item():.3f}", flush=True)
    network.eval()
    with torch.no_grad():
        print(detector.evaluate(network, detector.evaluation_data()))
    weights = network.state_dict()
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            weights[name] = tensor.half()
    save_file(weights, detector.WEIGHTS)


if __name__ == "__main__":
    main()
